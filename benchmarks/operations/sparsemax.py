"""Sparsemax: over the last dimension."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider, row_case, wide


@operation("sparsemax", tokens=8192)
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield row_case(data, tokens, model.hidden)


@provider("sparsemax", "torch")
def eager(x: Tensor) -> Tensor:
    ordered = wide(x).sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    size = (ordered * torch.arange(1, x.shape[-1] + 1, device=x.device) > excess).sum(-1, keepdim=True)
    threshold = excess.gather(-1, size - 1) / size
    return torch.relu(wide(x) - threshold).to(x.dtype)  # unlike clamp's, its gradient is 0 at the threshold


library("sparsemax", "liger-kernel", "liger_kernel.transformers.functional:liger_sparsemax")
library("sparsemax", "liger_trainer", "liger_trainer.functional:sparsemax")
