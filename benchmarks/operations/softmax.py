"""Softmax: over the last dimension."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, operation, provider, row_case


@operation("softmax", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield row_case(data, tokens, model.hidden)


@provider("softmax", "torch")
def eager(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


@provider("softmax", "liger-kernel")
def liger(x: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_softmax

    return liger_softmax(x)


@provider("softmax", "quack")
def quack(x: Tensor) -> Tensor:
    from quack import softmax

    return softmax(x)


@provider("softmax", "liger_trainer")
def ours(x: Tensor) -> Tensor:
    from liger_trainer.functional import softmax

    return softmax(x)
