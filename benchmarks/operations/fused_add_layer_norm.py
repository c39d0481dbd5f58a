"""Residual add + LayerNorm: both results are used."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, library, operation, provider


@operation("fused_add_layer_norm")
def cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    shape = tokens, model.hidden
    size = tokens * model.hidden
    inputs = {"x": data.normal(*shape), "residual": data.normal(*shape)}
    parameters = {"weight": data.normal(model.hidden), "bias": data.normal(model.hidden), "eps": 1e-5}
    upstream = data.upstream(*shape), data.upstream(*shape)
    yield Case(inputs | parameters, f"{tokens}×{model.hidden}", Floor(4 * size, 4 * size), upstream)


@provider("fused_add_layer_norm", "torch")
def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


library("fused_add_layer_norm", "liger_trainer", "liger_trainer.functional:fused_add_layer_norm")
