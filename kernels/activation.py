"""The activations that kernels compute: one table for gated MLPs, MLPs with adapters and blocks of experts.

::

    silu:          act(x) = x * s(x)      act'(x) = s + x * s * (1 - s),                        s the logistic sigmoid
    gelu_tanh:     act(x) = x * s(2z)     act'(x) = s + x * s * (1 - s) * 2 dz/dx,              s = s(2z)
                                          z = sqrt(2/pi) * (x + 0.044715 x^3);  0.5 * (1 + tanh z) = s(2z)
    gelu:          act(x) = x * Phi(x)    act'(x) = Phi + x * phi(x),                           of the standard normal
    relu_squared:  act(x) = max(x, 0)^2   act'(x) = 2 max(x, 0)
    relu:          act(x) = max(x, 0)     act'(x) = 1 where x > 0, else 0

A new activation is a branch of `activation_and_derivative` and a row of `_ROWS`.

Before them: a logarithm, a root and a quotient of few instructions on NVIDIA GPUs, and the hyperbolic tangent.

On NVIDIA GPUs ``tl.log2`` is a library routine of about 25 instructions with a branch per element, which makes kernels
that take logarithms of whole rows compute-bound. The error of ``lg2.approx`` is at most 2**-22, relative or, near 1,
absolute. On other GPUs ``tl.log2`` is a hardware instruction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from liger_trainer.kernels.runtime import INTERPRETED, tl, triton


def has_lg2(tensor: torch.Tensor) -> bool:
    """Whether kernels on the device of `tensor` may use PTX; the value for `LG2` of `log2`, and for `FAST`."""
    return tensor.device.type == "cuda" and torch.version.hip is None and not INTERPRETED


@triton.jit
def log2(x, LG2: tl.constexpr):
    """log2 of an fp32 tensor, clamped from below to the smallest normal number; unspecified for NaN."""
    x = tl.maximum(x, 1.1754943508222875e-38)
    if LG2:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505 (a compile-time branch)
        return tl.log2(x)


@triton.jit
def tanh_and_derivative(x):
    """tanh(x) and 1 - tanh(x)^2 of an fp32 tensor, with the relative error of a few roundings."""
    decay = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + decay)
    far = (1.0 - decay) * inverse
    square = x * x
    near = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    tanh = tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0, -far, far))
    return tanh, 4.0 * decay * inverse * inverse


@triton.jit
def fast_sqrt(x, FAST: tl.constexpr):
    """The root of an fp32 tensor; with `FAST`, PTX: to a relative 2**-22, and 0 below the smallest normal number."""
    if FAST:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 (a compile-time branch)
        return tl.sqrt(x)


@triton.jit
def fast_quotient(x, y, FAST: tl.constexpr):
    """The quotient x / y of fp32 tensors with y in 2**-126 ... 2**126; with `FAST`, PTX, to a relative 2**-22."""
    if FAST:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return x / y


IDENTITY = "identity"


@triton.jit
def activation_and_derivative(x, ACTIVATION: tl.constexpr):
    """act(x) and act'(x) of an fp32 tensor."""
    if ACTIVATION == "silu":
        denominator = 1.0 + tl.exp(-x)
        sigmoid = 1.0 / denominator
        activation = x / denominator
        derivative = sigmoid + x * (sigmoid * (1.0 - sigmoid))
    elif ACTIVATION == "gelu_tanh":
        two_z = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)  # 2 * sqrt(2 / pi)
        sigmoid = 1.0 / (1.0 + tl.exp(-two_z))
        activation = x * sigmoid
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        derivative = sigmoid + x * (sigmoid * (1.0 - sigmoid)) * slope
    elif ACTIVATION == "identity":
        derivative = tl.full(x.shape, 1.0, tl.float32)
        activation = x
    elif ACTIVATION == "relu":
        activation = tl.where(x < 0.0, 0.0, x)  # a NaN stays one
        derivative = tl.where(x > 0.0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        positive = tl.where(x < 0.0, 0.0, x)  # a NaN stays one
        activation = positive * positive
        derivative = 2.0 * positive
    else:
        tl.static_assert(ACTIVATION == "gelu")
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
        activation = x * cdf
        derivative = cdf + x * density
    return activation, derivative


@triton.jit
def gate_and_up(gate, up, gate_multiplier, limit, up_offset, CLAMP: tl.constexpr, ACTIVATION: tl.constexpr):
    """act(gate), its derivative by gate, up + up_offset, and where the clamps let the gradients of gate and up pass."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    gate_passes, up_passes = gate <= limit, (up >= -limit) & (up <= limit)
    if CLAMP:
        # Not tl.minimum and tl.maximum, which would turn a NaN into the limit.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    activation, derivative = activation_and_derivative(gate * gate_multiplier, ACTIVATION)
    return activation, derivative * gate_multiplier, up + up_offset, gate_passes, up_passes


@triton.jit
def rounded_product(activation, factor, down_multiplier, dtype: tl.constexpr):
    """h, in fp32; the activation is rounded to `dtype` first."""
    return (activation * down_multiplier).to(dtype).to(tl.float32) * factor


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _silu_derivative(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.silu_backward(torch.ones_like(x), x)


def _gelu_derivative(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x)


def _gelu_tanh_derivative(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.gelu_backward(torch.ones_like(x), x, approximate="tanh")


class Activation(NamedTuple):
    """A row of the table.

    Args:
        name: Name in kernels and operators, in `moe_experts` and in `lora_mlp`.
        value: act(x) in plain torch.
        derivative: act'(x) in plain torch.
        component: The kernel of gated MLPs that has it, ``"swiglu"`` or ``"geglu"``: the switch in `KernelConfig` and
            the name in reports. None where only blocks of experts have it.
        detail: The word that the report adds to `component`.
    """

    name: str
    value: Callable[[torch.Tensor], torch.Tensor]
    derivative: Callable[[torch.Tensor], torch.Tensor]
    component: str | None = None
    detail: str = ""


SILU = Activation("silu", F.silu, _silu_derivative, "swiglu")
GELU_TANH = Activation("gelu_tanh", _gelu_tanh, _gelu_tanh_derivative, "geglu", "tanh")
GELU = Activation("gelu", F.gelu, _gelu_derivative, "geglu", "exact")

_ROWS = (
    SILU,
    GELU_TANH,
    GELU,
    Activation("relu_squared", lambda x: F.relu(x).square(), lambda x: 2 * F.relu(x)),
    Activation("relu", F.relu, lambda x: (x > 0).to(x.dtype)),
    Activation(IDENTITY, lambda x: x, torch.ones_like),
)
ACTIVATIONS = {row.name: row for row in _ROWS}
"""Every activation by its name, likely ones first; the identity stands for a function that torch runs."""

NAMES = sorted((name for name in ACTIVATIONS if name != IDENTITY), key=lambda name: (name != "silu", name))
"""What `moe_experts` takes: the default first."""

GATED = {row.name: row for row in _ROWS if row.component is not None}
"""The activations of gated MLPs, by their names."""


class GatedActivation(NamedTuple):
    """An activation with its options, in the order in which operators take them.

    Args:
        activation: Name of a row of `_ROWS`.
        scalars: Multipliers of the gate and of the product, the clamps' limit and the offset of up.
        interleaved: Whether the columns of gate and up alternate.
    """

    activation: str
    scalars: Sequence[float]
    interleaved: bool = False

    @classmethod
    def of(
        cls,
        activation: str,
        gate_multiplier: float = 1.0,
        down_multiplier: float = 1.0,
        limit: float | None = None,
        up_offset: float = 0.0,
        interleaved: bool = False,
    ) -> GatedActivation:
        """With numbers of any kind; no limit is infinity."""
        bound = math.inf if limit is None else float(limit)
        return cls(activation, [float(gate_multiplier), float(down_multiplier), bound, float(up_offset)], interleaved)

    @property
    def limit(self) -> float:
        """The clamps' limit, infinity without clamps."""
        return self.scalars[2]

    @property
    def constants(self) -> dict[str, Any]:
        """The constants of kernels."""
        return {"ACTIVATION": self.activation, "CLAMP": self.limit < math.inf, "INTERLEAVED": self.interleaved}
