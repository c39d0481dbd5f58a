"""The activation between an expert's two projections, its gradient, and that of the routing weight.

With p the first projection's output (gate and up, or one of them), w the routing weight of a row and g the gradient of
its unweighted result times the second weight, ``g = dO_t @ W``::

    h = f(p)              dw = <g, h>           dp = w g f'(p)            w h, for the second weight's gradient

f is ``act(gate) * up`` with the scales and clamps of `_gated_activation`, or ``act(p)`` where nothing is gated; with
``act(p) = p``, p is what some other function has made of the first projection's output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from liger_trainer.kernels.moe import activation_kernels as _moe_activation_kernels
from liger_trainer.kernels.moe.routing import ExpertRows
from liger_trainer.kernels.runtime import use_triton

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu_squared")
IDENTITY = "identity"


def activate(
    pre: torch.Tensor, activation: str, scalars: Sequence[float], gated: bool, interleaved: bool
) -> torch.Tensor:
    """Of pre (R, 2 I), or (R, I) where nothing is gated: h (R, I)."""
    if activation == IDENTITY:
        return pre
    if use_triton(pre):
        return _moe_activation_kernels.forward(pre, activation, scalars, gated, interleaved)
    gate, up, _, _ = _clamped(_wide(pre), scalars, gated, interleaved)
    h = value(gate * scalars[0], activation) * scalars[1]
    return (h if up is None else h * (up + scalars[3])).to(pre.dtype)


def activation_gradients(
    dh: torch.Tensor,
    pre: torch.Tensor,
    weights: torch.Tensor,
    rows: ExpertRows,
    activation: str,
    scalars: Sequence[float],
    gated: bool,
    interleaved: bool,
    need_h: bool,
    overwrite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradients of pre and of the routing weights, and the weighted h.

    Args:
        dh: (R, I), the g of the formula; overwritten by the weighted h where that is needed.
        pre: (R, 2 I) or (R, I); overwritten by its gradient with `overwrite`.
        weights: (T, k).
        rows: Of the choices.
        activation: One of ACTIVATIONS, or IDENTITY.
        scalars: As `_gated_activation.scalars`.
        gated: Whether pre is gate and up.
        interleaved: Whether these take turns.
        need_h: Whether the weighted h is needed.
        overwrite: Whether pre may be written over.
    """
    if use_triton(pre):
        return _moe_activation_kernels.backward(
            dh, pre, weights, rows, activation, scalars, gated, interleaved, need_h, overwrite
        )
    exists = torch.arange(len(pre), device=pre.device) < rows.offsets[-1]
    dtype = pre.dtype
    dh = torch.where(exists[:, None], _wide(dh), 0.0)
    pre = torch.where(exists[:, None], _wide(pre), 0.0)
    gate, up, gate_passes, up_passes = _clamped(pre, scalars, gated, interleaved)
    act = value(gate * scalars[0], activation) * scalars[1]
    factor = 1.0 if up is None else up + scalars[3]
    h = act * factor
    dweights = torch.zeros(len(pre), dtype=weights.dtype, device=pre.device)
    dweights[rows.order.long()] = (dh * h).sum(1).to(weights.dtype)
    weight = weights.reshape(-1)[rows.order.long()].unsqueeze(1).to(dh.dtype)
    dh = dh * weight
    dgate = gate_passes * dh * factor * derivative(gate * scalars[0], activation) * scalars[0] * scalars[1]
    if up is None:
        dpre = dgate
    else:
        dup = up_passes * dh * act
        dpre = torch.stack((dgate, dup), -1).flatten(1) if interleaved else torch.cat((dgate, dup), 1)
    return dpre.to(dtype), dweights.view(weights.shape), (h * weight).to(dtype) if need_h else None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In the precision that the kernels compute in."""
    return x if x.dtype == torch.float64 else x.float()


def _clamped(pre: torch.Tensor, scalars: Sequence[float], gated: bool, interleaved: bool):
    if not gated:
        return pre, None, 1.0, 1.0
    gate, up = (pre[:, ::2], pre[:, 1::2]) if interleaved else pre.chunk(2, dim=1)
    limit = scalars[2]
    if limit == math.inf:
        return gate, up, 1.0, 1.0
    return gate.clamp(max=limit), up.clamp(-limit, limit), gate <= limit, (up >= -limit) & (up <= limit)


def value(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act(x)."""
    if activation == IDENTITY:
        return x
    if activation == "silu":
        return F.silu(x)
    if activation in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="none" if activation == "gelu" else "tanh")
    return F.relu(x) if activation == "relu" else F.relu(x).square()


def derivative(x: torch.Tensor, activation: str) -> torch.Tensor:
    """act'(x)."""
    ones = torch.ones_like(x)
    if activation == IDENTITY:
        return ones
    if activation == "silu":
        return torch.ops.aten.silu_backward(ones, x)
    if activation in ("gelu", "gelu_tanh"):
        return torch.ops.aten.gelu_backward(ones, x, approximate="none" if activation == "gelu" else "tanh")
    return (x > 0).to(x.dtype) if activation == "relu" else 2 * F.relu(x)
