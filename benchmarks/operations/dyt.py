"""DyT: gamma * tanh(alpha * x) + beta."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider, row_case


@operation("dyt")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    alpha, gamma, beta = (data.normal(size) for size in (1, model.hidden, model.hidden))
    yield row_case(data, tokens, model.hidden, alpha=alpha, gamma=gamma, beta=beta)


@provider("dyt", "torch")
def eager(x: Tensor, alpha: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return gamma * torch.tanh(alpha * x) + beta


library("dyt", "liger-kernel", "liger_kernel.transformers.functional:liger_dyt")
library("dyt", "liger_trainer", "liger_trainer.functional:dyt")
