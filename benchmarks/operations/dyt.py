"""DyT: gamma * tanh(alpha * x) + beta."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, operation, provider, row_case


@operation("dyt")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    alpha, gamma, beta = (data.normal(size) for size in (1, model.hidden, model.hidden))
    yield row_case(data, tokens, model.hidden, alpha=alpha, gamma=gamma, beta=beta)


@provider("dyt", "torch")
def eager(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return gamma * torch.tanh(alpha * x) + beta


@provider("dyt", "liger-kernel")
def liger(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_dyt

    return liger_dyt(x, alpha, gamma, beta)


@provider("dyt", "liger_trainer")
def ours(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    from liger_trainer.functional import dyt

    return dyt(x, alpha, gamma, beta)
