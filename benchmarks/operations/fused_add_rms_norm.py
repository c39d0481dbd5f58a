"""Residual add + RMSNorm: both results are used."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, wide


@operation("fused_add_rms_norm")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Two inputs and two outputs in each pass: x and residual share one gradient."""
    shape = tokens, model.hidden
    inputs = {"x": data.normal(*shape), "residual": data.normal(*shape), "weight": data.normal(model.hidden)}
    size = tokens * model.hidden
    yield Case(
        inputs | {"eps": 1e-6},
        f"{tokens}×{model.hidden}",
        Floor(4 * size, 4 * size),
        (data.upstream(*shape), data.upstream(*shape)),
    )


@provider("fused_add_rms_norm", "torch")
def eager(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    exact = wide(total)
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype), total


library("fused_add_rms_norm", "liger-kernel", "liger_kernel.transformers.functional:liger_fused_add_rms_norm")


@provider("fused_add_rms_norm", "quack")
def quack(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from quack import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)


library("fused_add_rms_norm", "liger_trainer", "liger_trainer.functional:fused_add_rms_norm")
