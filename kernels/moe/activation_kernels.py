"""The elementwise kernels of `_moe_activation`: a program walks over the columns of a few rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from liger_trainer.kernels.mlp.gated_activation import gate_and_up
from liger_trainer.kernels.moe.routing import ExpertRows
from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton

ROWS, BLOCK, WARPS = 8, 256, 4


@triton.jit
def load_gate_and_up(pre_ptr, row, column, exists, width, GATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two operands of some rows (ROWS, 1) and columns (1, BLOCK) of pre; up is 1 where nothing is gated."""
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
    gate, up = load_gate_and_up(pre_ptr, row, column, exists, width, GATED, INTERLEAVED)
    activation, _, factor, _, _ = gate_and_up(gate, up, gate_multiplier, limit, up_offset, CLAMP, ACTIVATION)
    h = (activation * down_multiplier).to(gate.dtype).to(tl.float32) * factor
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
        gate, up = load_gate_and_up(pre_ptr, wide_row, column, exists, width, GATED, INTERLEAVED)
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
    # A row of no expert has a weight with gradient 0.
    total = tl.sum(dweights, 1)
    tl.store(dweights_ptr + choice, total.to(dweights_ptr.dtype.element_ty), mask=row < rows)


def _constants(pre: torch.Tensor, scalars: Sequence[float], activation: str, gated: bool, interleaved: bool) -> dict:
    return {
        "ACTIVATION": activation,
        "CLAMP": scalars[2] < math.inf,
        "GATED": gated,
        "INTERLEAVED": interleaved,
        "ROWS": ROWS,
        "BLOCK": BLOCK,
        "num_warps": WARPS,
    }


def forward(
    pre: torch.Tensor, activation: str, scalars: Sequence[float], gated: bool, interleaved: bool
) -> torch.Tensor:
    """As `activate`."""
    rows, width = pre.shape[0], pre.shape[1] // (2 if gated else 1)
    h = pre.new_empty(rows, width)
    if h.numel():
        with on_device(pre):
            _forward_kernel[(cdiv(rows, ROWS), cdiv(width, BLOCK))](
                pre,
                h,
                rows,
                width,
                *scalars,
                **_constants(pre, scalars, activation, gated, interleaved),
            )
    return h


def backward(
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
    """As `activation_gradients`."""
    dpre = pre if overwrite else torch.empty_like(pre)
    dweights = torch.empty_like(weights)
    if dh.numel():
        with on_device(pre):
            _backward_kernel[(cdiv(dh.shape[0], ROWS),)](
                dh,
                pre,
                weights,
                rows.order,
                rows.offsets[-1:],
                dpre,
                dweights,
                dh,
                dh.shape[0],
                dh.shape[1],
                *scalars,
                NEED_H=need_h,
                **_constants(pre, scalars, activation, gated, interleaved),
            )
    return dpre, dweights, dh if need_h else None
