"""Softmax: over the last dimension."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider, row_case


@operation("softmax", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield row_case(data, tokens, model.hidden)


@provider("softmax", "torch")
def eager(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


library("softmax", "liger-kernel", "liger_kernel.transformers.functional:liger_softmax")
library("softmax", "quack", "quack:softmax")
library("softmax", "liger_trainer", "liger_trainer.functional:softmax")
