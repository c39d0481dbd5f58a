"""DyT: gamma * tanh(alpha * x) + beta."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, operation, provider, row_case


@operation("dyt")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    parameters = {"alpha": data.normal(1), "gamma": data.normal(model.hidden), "beta": data.normal(model.hidden)}
    yield row_case(data, tokens, model.hidden, **parameters)


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
