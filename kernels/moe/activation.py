"""The activation between an expert's two projections, its gradient, and that of the routing weights.

With p the output of the first projection (gate and up, or a single one), w the routing weight of a row and g the
gradient of the row's unweighted result times the second weight, ``g = dO_t @ W``::

    h = f(p)              dw = <g, h>           dp = w g f'(p)            w h, for the second weight's gradient

f is ``act(gate) * up`` with the scales and clamps of `kernels/mlp/gated_activation.py`, or ``act(p)`` without a gate;
the activations are those of `kernels/activation.py`.
With the identity as act, p is the result of a function that torch ran on the output of the first projection.

Both kernels are elementwise; a program of the backward walks over the columns of a few rows and sums dw on the way.

Shapes: T tokens, k choices of each, R = T k rows sorted by expert, E experts, I intermediate size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from liger_trainer.kernels.activation import ACTIVATIONS, IDENTITY, GatedActivation, gate_and_up, rounded_product
from liger_trainer.kernels.moe.sort_by_expert import ExpertRows
from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton, use_triton

_ROWS, _BLOCK, _WARPS = 8, 256, 4


def _constants(form: GatedActivation, gated: bool) -> dict[str, Any]:
    """The constants of both kernels."""
    tile = {"ROWS": _ROWS, "BLOCK": _BLOCK, "num_warps": _WARPS}
    return {**form.constants, "GATED": gated, **tile}


@triton.jit
def _load_gate_and_up(pre_ptr, row, column, exists, width, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up of some rows (ROWS, 1) and columns (1, BLOCK) of pre; up is 1 without a gate."""
    base = pre_ptr + row * ((2 if GATED else 1) * width)
    if GATED and INTERLEAVED:
        gate = tl.load(base + 2 * column, mask=exists, other=0.0)
        up = tl.load(base + 2 * column + 1, mask=exists, other=0.0)
    elif GATED:
        gate = tl.load(base + column, mask=exists, other=0.0)
        up = tl.load(base + width + column, mask=exists, other=0.0)
    else:
        gate = tl.load(base + column, mask=exists, other=0.0)
        up = tl.full(gate.shape, 1.0, tl.float32)
    return gate, up


@triton.jit
def _forward_kernel(
    pre_ptr,
    h_ptr,
    rows,
    width,
    gate_multiplier,
    down_multiplier,
    limit,
    up_offset,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    exists = (row < rows) & (column < width)
    gate, up = _load_gate_and_up(pre_ptr, row, column, exists, width, GATED, INTERLEAVED)
    activation, _, factor, _, _ = gate_and_up(gate, up, gate_multiplier, limit, up_offset, CLAMP, ACTIVATION)
    h = rounded_product(activation, factor, down_multiplier, gate.dtype)
    tl.store(h_ptr + row * width + column, h.to(h_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _backward_kernel(
    dh_ptr,
    pre_ptr,
    weights_ptr,
    order_ptr,
    end_ptr,
    dpre_ptr,  # may be pre
    dweights_ptr,
    weighted_h_ptr,  # may be dh
    rows,
    width,
    gate_multiplier,
    down_multiplier,
    limit,
    up_offset,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NEED_H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    choice = tl.load(order_ptr + row, mask=row < rows, other=0)
    computed = row < tl.load(end_ptr)
    weight = tl.load(weights_ptr + choice, mask=computed, other=0.0).to(tl.float32)[:, None]
    dweights = tl.zeros((ROWS, BLOCK), tl.float32)
    wide_row = row.to(tl.int64)[:, None]
    for start in range(0, width, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        exists = computed[:, None] & (column < width)
        dh = tl.load(dh_ptr + wide_row * width + column, mask=exists, other=0.0).to(tl.float32) * down_multiplier
        gate, up = _load_gate_and_up(pre_ptr, wide_row, column, exists, width, GATED, INTERLEAVED)
        activation, derivative, factor, gate_passes, up_passes = gate_and_up(
            gate, up, gate_multiplier, limit, up_offset, CLAMP, ACTIVATION
        )
        h = activation * factor
        dweights += dh * h
        dgate = dh * factor * derivative * weight
        dup = dh * activation * weight
        if CLAMP:
            dgate = tl.where(gate_passes, dgate, 0.0)
            dup = tl.where(up_passes, dup, 0.0)
        dpre_base = dpre_ptr + wide_row * ((2 if GATED else 1) * width)
        if GATED and INTERLEAVED:
            tl.store(dpre_base + 2 * column, dgate.to(dpre_ptr.dtype.element_ty), mask=exists)
            tl.store(dpre_base + 2 * column + 1, dup.to(dpre_ptr.dtype.element_ty), mask=exists)
        else:
            tl.store(dpre_base + column, dgate.to(dpre_ptr.dtype.element_ty), mask=exists)
            if GATED:
                tl.store(dpre_base + width + column, dup.to(dpre_ptr.dtype.element_ty), mask=exists)
        if NEED_H:
            weighted = h * down_multiplier * weight
            tl.store(
                weighted_h_ptr + wide_row * width + column, weighted.to(weighted_h_ptr.dtype.element_ty), mask=exists
            )
    # The routing weight of a row of no expert gets the gradient 0.
    total = tl.sum(dweights, 1)
    tl.store(dweights_ptr + choice, total.to(dweights_ptr.dtype.element_ty), mask=row < rows)


def activate(pre: torch.Tensor, form: GatedActivation, gated: bool = True) -> torch.Tensor:
    """The activation h (R, I) of pre (R, 2 I), or of pre (R, I) without a gate."""
    if form.activation == IDENTITY:
        return pre
    scalars = form.scalars
    if not use_triton(pre):
        gate, up, _, _ = _clamped(_wide(pre), form, gated)
        h = ACTIVATIONS[form.activation].value(gate * scalars[0]) * scalars[1]
        return (h if up is None else h * (up + scalars[3])).to(pre.dtype)
    rows, width = pre.shape[0], pre.shape[1] // (2 if gated else 1)
    h = pre.new_empty(rows, width)
    if h.numel():
        grid = cdiv(rows, _ROWS), cdiv(width, _BLOCK)
        with on_device(pre):
            _forward_kernel[grid](pre, h, rows, width, *scalars, **_constants(form, gated))
    return h


def activation_gradients_(
    dpre: torch.Tensor,
    dh: torch.Tensor,
    pre: torch.Tensor,
    weights: torch.Tensor,
    rows: ExpertRows,
    form: GatedActivation,
    gated: bool,
    need_h: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Writes the gradient of pre, and returns that of the routing weights and the weighted h.

    Args:
        dpre: Memory for the gradient of pre; may be `pre`.
        dh: (R, I), the g of the formula; the kernel overwrites it with the weighted h where that is needed.
        pre: (R, 2 I) or (R, I).
        weights: (T, k), the routing weights.
        rows: The R = T * k choices.
        form: The activation.
        gated: Whether there are gate and up.
        need_h: Whether the weighted h is needed.

    Returns:
        The gradient of the weights, (T, k), and the weighted h, (R, I), or None.
    """
    scalars = form.scalars
    if use_triton(pre):
        dweights = torch.empty_like(weights)
        if dh.numel():
            with on_device(pre):
                _backward_kernel[(cdiv(dh.shape[0], _ROWS),)](
                    *(dh, pre, weights, rows.order, rows.offsets[-1:], dpre, dweights, dh, *dh.shape, *scalars),
                    NEED_H=need_h,
                    **_constants(form, gated),
                )
        return dweights, dh if need_h else None
    exists = torch.arange(len(pre), device=pre.device) < rows.offsets[-1]
    dh = torch.where(exists[:, None], _wide(dh), 0.0)
    gate, up, gate_passes, up_passes = _clamped(torch.where(exists[:, None], _wide(pre), 0.0), form, gated)
    row = ACTIVATIONS[form.activation]
    act = row.value(gate * scalars[0]) * scalars[1]
    factor = 1.0 if up is None else up + scalars[3]
    h = act * factor
    dweights = torch.zeros(len(pre), dtype=weights.dtype, device=pre.device)
    dweights[rows.order.long()] = (dh * h).sum(1).to(weights.dtype)
    weight = weights.reshape(-1)[rows.order.long()].unsqueeze(1).to(dh.dtype)
    dh = dh * weight
    dgate = gate_passes * dh * factor * row.derivative(gate * scalars[0]) * scalars[0] * scalars[1]
    if up is None:
        dpre.copy_(dgate)
    else:
        dup = up_passes * dh * act
        dpre.copy_(torch.stack((dgate, dup), -1).flatten(1) if form.interleaved else torch.cat((dgate, dup), 1))
    return dweights.view(weights.shape), (h * weight).to(pre.dtype) if need_h else None


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in the precision that the kernels compute in."""
    return x if x.dtype == torch.float64 else x.float()


def _clamped(
    pre: torch.Tensor, form: GatedActivation, gated: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | float, torch.Tensor | float]:
    """Gate and up after the clamps, and where each lets a gradient through."""
    if not gated:
        return pre, None, 1.0, 1.0
    gate, up = (pre[:, ::2], pre[:, 1::2]) if form.interleaved else pre.chunk(2, dim=1)
    limit = form.limit
    if limit == math.inf:
        return gate, up, 1.0, 1.0
    return gate.clamp(max=limit), up.clamp(-limit, limit), gate <= limit, (up >= -limit) & (up <= limit)
