"""Normalisations of the hidden states, and what takes their place."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from liger_trainer.benchmarks.models import Model
from liger_trainer.benchmarks.registry import Case, Data, Floor, case_of_rows, library, operation, provider, wide


@operation("rms_norm", "RMSNorm: cast as Llama casts")
def rms_norm_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """The hidden states and, if the model normalises queries and keys, the heads."""
    yield case_of_rows(data, (tokens, model.hidden), weight=data.normal(model.hidden), eps=1e-6)
    if model.qk_norm:
        shape = (tokens * (model.heads + model.kv_heads), model.head_dim)
        yield case_of_rows(data, shape, variant="heads", weight=data.normal(model.head_dim), eps=1e-6)


@provider("rms_norm", "torch")
def eager_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    exact = wide(x)
    return weight * (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


library("rms_norm", "liger-kernel")
library("rms_norm", "quack", path="quack:rmsnorm", by_name=["eps"])
library("rms_norm", "liger_trainer")


@operation("gated_rms_norm", "RMSNorm times a gate, as in gated delta nets: heads of 128")
def gated_rms_norm_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Heads as wide together as the hidden states."""
    yield case_of_rows(data, (tokens * model.hidden // 128, 128), ("x", "gate"), weight=data.normal(128), eps=1e-6)


@provider("gated_rms_norm", "torch")
def eager_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (eager_rms_norm(x, weight, eps) * F.silu(wide(gate))).to(x.dtype)


library("gated_rms_norm", "liger_trainer")


def added_cases(data: Data, rows: int, width: int, parameters: tuple[str, ...], eps: float) -> Iterator[Case]:
    """Two inputs and two outputs in each pass: x and residual share one gradient."""
    inputs = {name: data.normal(rows, width) for name in ("x", "residual")}
    weights = {name: data.normal(width) for name in parameters}
    upstream, size = (data.upstream(rows, width), data.upstream(rows, width)), rows * width
    yield Case({**inputs, **weights, "eps": eps}, f"{rows}×{width}", Floor(4 * size, 4 * size), upstream)


def of_the_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The norm of x + residual, and the sum."""

    def run(x: Tensor, residual: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, **others), total

    return run


@operation("fused_add_rms_norm", "Residual add + RMSNorm: both results are used")
def fused_add_rms_norm_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    return added_cases(data, tokens, model.hidden, ("weight",), eps=1e-6)


provider("fused_add_rms_norm", "torch")(of_the_sum(eager_rms_norm))
library("fused_add_rms_norm", "liger-kernel")
library("fused_add_rms_norm", "quack", path="quack:rmsnorm", by_name=["residual", "eps"], fixed={"prenorm": True})
library("fused_add_rms_norm", "liger_trainer")


@operation("layer_norm", "LayerNorm: with weight and bias")
def layer_norm_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    weight, bias = data.normal(model.hidden), data.normal(model.hidden)
    yield case_of_rows(data, (tokens, model.hidden), weight=weight, bias=bias, eps=1e-5)


@provider("layer_norm", "torch")
def eager_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


library("layer_norm", "liger-kernel", "liger_trainer")


@operation("fused_add_layer_norm", "Residual add + LayerNorm: both results are used")
def fused_add_layer_norm_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    return added_cases(data, tokens, model.hidden, ("weight", "bias"), eps=1e-5)


provider("fused_add_layer_norm", "torch")(of_the_sum(eager_layer_norm))
library("fused_add_layer_norm", "liger_trainer")


@operation("group_norm", "GroupNorm: images of 256 pixels, the hidden size their channels")
def group_norm_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    weight, bias = data.normal(model.hidden), data.normal(model.hidden)
    shape = max(1, tokens // 256), model.hidden, 256
    yield case_of_rows(data, shape, groups=32, weight=weight, bias=bias, eps=1e-5)


@provider("group_norm", "torch")
def eager_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.group_norm(x, groups, weight, bias, eps)


@provider("group_norm", "liger-kernel")
def liger_group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    from liger_kernel.transformers.functional import liger_group_norm

    return liger_group_norm(x, weight, bias, x.shape[1], groups, eps)


library("group_norm", "liger_trainer")


@operation("modulated_rms_norm", "Modulated RMSNorm: a scale and a shift for each sample (adaLN)")
def modulated_rms_norm_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    """Samples of up to 4096 tokens, each with one row of modulation."""
    length = min(tokens, 4096)
    scale, shift = (data.normal(tokens // length, 1, model.hidden) for _ in range(2))
    weight, shape = data.normal(model.hidden), (tokens // length, length, model.hidden)
    yield case_of_rows(data, shape, weight=weight, scale=scale, shift=shift, eps=1e-6)


@provider("modulated_rms_norm", "torch")
def eager_modulated_rms_norm(x: Tensor, weight: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return eager_rms_norm(x, weight, eps) * (1 + scale) + shift


library("modulated_rms_norm", "liger-kernel", "liger_trainer")


@operation("poly_norm", "PolyNorm: normalised cube, square and value, weighted")
def poly_norm_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    yield case_of_rows(data, (tokens, model.hidden), weight=data.normal(3), bias=data.normal(), eps=1e-6)


@provider("poly_norm", "torch")
def eager_poly_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    exact = wide(x)

    def normalised(power: Tensor) -> Tensor:
        return power * torch.rsqrt(power.square().mean(-1, keepdim=True) + eps)

    mixed = weight[0] * normalised(exact**3) + weight[1] * normalised(exact**2) + weight[2] * normalised(exact)
    return (mixed + bias).to(x.dtype)


library("poly_norm", "liger-kernel", "liger_trainer")


@operation("dyt", "DyT: gamma * tanh(alpha * x) + beta")
def dyt_cases(data: Data, model: Model, tokens: int) -> Iterator[Case]:
    alpha, gamma, beta = (data.normal(size) for size in (1, model.hidden, model.hidden))
    yield case_of_rows(data, (tokens, model.hidden), alpha=alpha, gamma=gamma, beta=beta)


provider("dyt", "torch")(lambda x, alpha, gamma, beta: gamma * torch.tanh(alpha * x) + beta)
library("dyt", "liger-kernel", "liger_trainer")
