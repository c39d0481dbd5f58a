"""Clamped SwiGLU: GPT-OSS's gate, gate and up in turns."""

from collections.abc import Iterator

import torch
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider


@operation("clamped_swiglu")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    size = tokens * model.intermediate
    yield Case(
        {"gate_up": data.normal(tokens, 2 * model.intermediate, scale=4.0)},
        f"{tokens}×{model.intermediate}",
        Floor(3 * size, 5 * size),
        (data.upstream(tokens, model.intermediate),),
    )


@provider("clamped_swiglu", "torch")
def eager(gate_up: Tensor) -> Tensor:
    gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


library("clamped_swiglu", "liger_trainer", "liger_trainer.functional:clamped_swiglu")
