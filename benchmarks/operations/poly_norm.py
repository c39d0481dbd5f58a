"""PolyNorm: normalised cube, square and value, weighted."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, library, operation, provider, row_case, wide


@operation("poly_norm")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield row_case(data, tokens, model.hidden, weight=data.normal(3), bias=data.normal(), eps=1e-6)


@provider("poly_norm", "torch")
def eager(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    exact = wide(x)

    def normalised(power: Tensor) -> Tensor:
        return power * torch.rsqrt(power.square().mean(-1, keepdim=True) + eps)

    mixed = weight[0] * normalised(exact**3) + weight[1] * normalised(exact**2) + weight[2] * normalised(exact)
    return (mixed + bias).to(x.dtype)


library("poly_norm", "liger-kernel", "liger_kernel.transformers.functional:liger_poly_norm")
library("poly_norm", "liger_trainer", "liger_trainer.functional:poly_norm")
