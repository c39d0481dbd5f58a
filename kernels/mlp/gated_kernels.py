"""The elementwise Triton kernels of the gated activations, and their launches; formulas in `_gated_activation`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton


@triton.jit
def _activation_and_derivative(x, ACTIVATION: tl.constexpr):
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
        derivative = tl.where(x < 0.0, 0.0, 2.0 * x)
        activation = 0.25 * derivative * derivative
    else:
        tl.static_assert(ACTIVATION == "gelu")
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))  # 1 / sqrt(2)
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)  # 1 / sqrt(2 pi)
        activation = x * cdf
        derivative = cdf + x * density
    return activation, derivative


@triton.jit
def _row_and_start(cols, FLAT: tl.constexpr, BLOCK: tl.constexpr):
    """The row (0 where everything is one flat array) and the first column of this program, in 64 bits."""
    row = 0
    block = tl.program_id(0)
    if not FLAT:
        blocks_per_row = tl.cdiv(cols, BLOCK)
        row = (block // blocks_per_row).to(tl.int64)
        block = block % blocks_per_row
    return row, block.to(tl.int64) * BLOCK


@triton.jit
def _load_pair(gate_row_ptr, up_row_ptr, start, cols, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    if INTERLEAVED:  # gate and up take turns: one wide load, taken apart in registers
        pairs = 2 * start + tl.arange(0, 2 * BLOCK)
        both = tl.load(gate_row_ptr + pairs, mask=pairs < 2 * cols, other=0.0)
        gate, up = tl.split(tl.reshape(both, (BLOCK, 2)))
    else:
        columns = start + tl.arange(0, BLOCK)
        gate = tl.load(gate_row_ptr + columns, mask=columns < cols, other=0.0)
        up = tl.load(up_row_ptr + columns, mask=columns < cols, other=0.0)
    return gate, up


@triton.jit
def gate_and_up(gate, up, gate_multiplier, limit, up_offset, CLAMP: tl.constexpr, ACTIVATION: tl.constexpr):
    """act(gate), d act / d gate, the factor beside act, and where the two clamps let a gradient through."""
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    gate_passes, up_passes = gate <= limit, (up >= -limit) & (up <= limit)
    if CLAMP:
        # Not minimum and maximum, which would turn a NaN into the limit.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    activation, derivative = _activation_and_derivative(gate * gate_multiplier, ACTIVATION)
    return activation, derivative * gate_multiplier, up + up_offset, gate_passes, up_passes


@triton.jit
def _forward_kernel(
    gate_ptr,
    up_ptr,
    h_ptr,
    cols,
    gate_stride,
    up_stride,
    h_stride,
    gate_multiplier,
    down_multiplier,
    limit,
    up_offset,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, start = _row_and_start(cols, FLAT, BLOCK)
    columns = start + tl.arange(0, BLOCK)
    gate, up = _load_pair(gate_ptr + row * gate_stride, up_ptr + row * up_stride, start, cols, INTERLEAVED, BLOCK)
    activation, _, factor, _, _ = gate_and_up(gate, up, gate_multiplier, limit, up_offset, CLAMP, ACTIVATION)
    h = (activation * down_multiplier).to(gate.dtype).to(tl.float32) * factor
    tl.store(h_ptr + row * h_stride + columns, h.to(h_ptr.dtype.element_ty), mask=columns < cols)


@triton.jit
def _backward_kernel(
    dh_ptr,
    gate_ptr,
    up_ptr,
    dgate_ptr,
    dup_ptr,
    h_ptr,
    cols,
    dh_stride,
    gate_stride,
    up_stride,
    dgate_stride,
    dup_stride,
    h_stride,
    gate_multiplier,
    down_multiplier,
    limit,
    up_offset,
    ACTIVATION: tl.constexpr,
    CLAMP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NEED_GATE: tl.constexpr,
    NEED_UP: tl.constexpr,
    NEED_H: tl.constexpr,
    FLAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # dgate may be gate, dup may be up and h may be dh: what is written depends on everything that was read there.
    row, start = _row_and_start(cols, FLAT, BLOCK)
    columns = start + tl.arange(0, BLOCK)
    mask = columns < cols
    dh = tl.load(dh_ptr + row * dh_stride + columns, mask=mask, other=0.0).to(tl.float32) * down_multiplier
    gate, up = _load_pair(gate_ptr + row * gate_stride, up_ptr + row * up_stride, start, cols, INTERLEAVED, BLOCK)
    activation, derivative, factor, gate_passes, up_passes = gate_and_up(
        gate, up, gate_multiplier, limit, up_offset, CLAMP, ACTIVATION
    )
    dgate = dh * factor * derivative
    dup = dh * activation
    if CLAMP:
        dgate = tl.where(gate_passes, dgate, 0.0)
        dup = tl.where(up_passes, dup, 0.0)
    if NEED_H:
        h = (activation * down_multiplier).to(gate.dtype).to(tl.float32) * factor
        tl.store(h_ptr + row * h_stride + columns, h.to(h_ptr.dtype.element_ty), mask=mask)
    dgate_row_ptr, dup_row_ptr = dgate_ptr + row * dgate_stride, dup_ptr + row * dup_stride
    if INTERLEAVED:
        both = tl.interleave(dgate, dup).to(dgate_ptr.dtype.element_ty)
        pairs = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(dgate_row_ptr + pairs, both, mask=pairs < 2 * cols)
    else:
        if NEED_GATE:
            tl.store(dgate_row_ptr + columns, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        if NEED_UP:
            tl.store(dup_row_ptr + columns, dup.to(dup_ptr.dtype.element_ty), mask=mask)


def launch_config(element_size: int) -> tuple[int, int]:
    """(elements a program, warps): 16 bytes a thread and tensor, for 128-bit loads with many in flight."""
    return (1024, 4) if element_size == 2 else (512, 4)


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(rows, columns) with contiguous columns; a view wherever the strides allow one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def halves(gate: torch.Tensor, up: torch.Tensor | None, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels take as gate and up; an interleaved projection goes in whole, as both."""
    if up is not None:
        return gate, up
    if interleaved:
        return gate, gate
    gate, up = gate.chunk(2, dim=-1)
    return gate, up


def _launch(
    kernel: Any,
    shape: torch.Size,
    tensors: list[torch.Tensor],
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
    **constants: bool,
) -> None:
    """Launches on (rows, columns) tensors, which the kernel takes first, followed by columns and row strides."""
    rows, cols = shape
    if rows * cols == 0:
        return
    flat = all(x.is_contiguous() for x in tensors)
    if flat:
        rows, cols = 1, rows * cols
    block, num_warps = launch_config(tensors[0].element_size())
    strides = [0 if flat else x.stride(0) for x in tensors]
    constants |= {"CLAMP": scalars[2] < math.inf, "INTERLEAVED": interleaved, "FLAT": flat}
    with on_device(tensors[0]):
        kernel[(rows * cdiv(cols, block),)](
            *tensors, cols, *strides, *scalars, ACTIVATION=activation, BLOCK=block, num_warps=num_warps, **constants
        )


def launch_forward(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    h: torch.Tensor,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
) -> None:
    """Writes `h`."""
    tensors = [rows_of(x) for x in (*halves(gate, up, interleaved), h)]
    _launch(_forward_kernel, tensors[2].shape, tensors, activation, scalars, interleaved)


def launch_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    dgate: torch.Tensor | None,
    dup: torch.Tensor | None,
    h: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
) -> None:
    """Writes what is given of `dgate`, `dup` and `h`; without `up`, `gate` and `dgate` are whole fused projections."""
    dh = rows_of(dh)
    if up is None:
        assert dgate is not None
        dgate, dup = halves(dgate, None, interleaved)
    # A result that nobody needs is not written; any tensor stands in for it.
    results = [dh if x is None else rows_of(x) for x in (dgate, dup, h)]
    tensors = [dh, *(rows_of(x) for x in halves(gate, up, interleaved)), *results]
    needed = {"NEED_GATE": dgate is not None, "NEED_UP": dup is not None, "NEED_H": h is not None}
    _launch(_backward_kernel, dh.shape, tensors, activation, scalars, interleaved, **needed)
