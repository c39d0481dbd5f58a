"""Modulated RMSNorm: a scale and a shift for each sample (adaLN)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider, wide


@operation("modulated_rms_norm")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Samples of up to 4096 tokens, each with one row of modulation."""
    length = min(tokens, 4096)
    samples = tokens // length
    shape = samples, length, model.hidden
    modulation = {name: data.normal(samples, 1, model.hidden) for name in ("scale", "shift")}
    size = samples * length * model.hidden
    yield Case(
        {"x": data.normal(*shape), "weight": data.normal(model.hidden), **modulation, "eps": 1e-6},
        "×".join(map(str, shape)),
        Floor(2 * size, 3 * size),
        (data.upstream(*shape),),
    )


@provider("modulated_rms_norm", "torch")
def eager(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    exact = wide(x)
    normed = weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed * (1 + scale) + shift


library("modulated_rms_norm", "liger-kernel", "liger_kernel.transformers.functional:liger_modulated_rms_norm")
library("modulated_rms_norm", "liger_trainer", "liger_trainer.functional:modulated_rms_norm")
