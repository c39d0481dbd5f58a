"""The gated activations' Triton kernels for projections whose adapters' products are still to be added.

An adapter's product ``s z @ B^T`` has as many elements as the projection it belongs to, and few multiplications each. A
matmul that adds it reads and writes them all once more; here each program has its tile in registers anyhow and adds

    gate + s z_g @ B_g^T        up + s z_u @ B_u^T        and, in the backward,        dh + dz @ A

by one small matmul over the rank, unrounded. Otherwise as `_gated_kernels`, formulas in `_gated_activation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels._gated_kernels import gate_and_up
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, on_device, tl, triton

MAX_RANK = 128
_BLOCK_ROWS, _BLOCK_COLS, _NUM_WARPS = 32, 64, 4  # measured on an H200


class LowRank(NamedTuple):
    """``scaling * z @ matrix``.

    Args:
        z: (rows, rank), of the activations' dtype; columns are contiguous.
        matrix: (rank, cols), of any floating dtype and strides.
        scaling: A factor.
    """

    z: torch.Tensor
    matrix: torch.Tensor
    scaling: float


@triton.jit
def _tile(ptr, row_stride, rows, columns):
    return ptr + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]


@triton.jit
def _plus_low_rank(
    tile, z_ptr, m_ptr, z_stride, m_row_stride, m_col_stride, scaling, rows, columns, num_rows, num_cols,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``tile + scaling * z @ matrix``, in fp32."""
    tile = tile.to(tl.float32)
    if RANK > 0:
        ranks = tl.arange(0, BLOCK_RANK)
        z_mask = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
        z = tl.load(_tile(z_ptr, z_stride, rows, ranks), mask=z_mask, other=0.0)
        m_ptrs = m_ptr + ranks[:, None] * m_row_stride + columns[None, :] * m_col_stride
        matrix = tl.load(m_ptrs, mask=(ranks < RANK)[:, None] & (columns < num_cols)[None, :], other=0.0)
        matrix = (matrix.to(tl.float32) * scaling).to(z.dtype)
        tile = tl.dot(z, matrix, acc=tile, input_precision=PRECISION)
    return tile


@triton.jit
def _rows_and_columns(num_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    across = tl.cdiv(num_cols, BLOCK_COLS)
    rows = (tl.program_id(0) // across) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    return rows, (tl.program_id(0) % across) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)


@triton.jit
def _lora_gated_forward_kernel(
    gate_ptr, up_ptr, h_ptr, gate_stride, up_stride, h_stride, num_rows, num_cols, limit,
    gate_z, gate_m, gate_zs, gate_ms, gate_mc, gate_scaling, GATE_RANK: tl.constexpr, GATE_BLOCK: tl.constexpr,
    up_z, up_m, up_zs, up_ms, up_mc, up_scaling, UP_RANK: tl.constexpr, UP_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows, columns = _rows_and_columns(num_cols, BLOCK_ROWS, BLOCK_COLS)
    mask = (rows < num_rows)[:, None] & (columns < num_cols)[None, :]
    gate = tl.load(_tile(gate_ptr, gate_stride, rows, columns), mask=mask, other=0.0)
    up = tl.load(_tile(up_ptr, up_stride, rows, columns), mask=mask, other=0.0)
    gate = _plus_low_rank(
        gate, gate_z, gate_m, gate_zs, gate_ms, gate_mc, gate_scaling, rows, columns, num_rows, num_cols,
        GATE_RANK, GATE_BLOCK, PRECISION,
    )  # fmt: skip
    up = _plus_low_rank(
        up, up_z, up_m, up_zs, up_ms, up_mc, up_scaling, rows, columns, num_rows, num_cols,
        UP_RANK, UP_BLOCK, PRECISION,
    )  # fmt: skip
    activation, _, factor, _, _ = gate_and_up(gate, up, 1.0, limit, 0.0, CLAMP, ACTIVATION)
    h = activation.to(h_ptr.dtype.element_ty).to(tl.float32) * factor
    tl.store(_tile(h_ptr, h_stride, rows, columns), h.to(h_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _lora_gated_backward_kernel(
    dh_ptr, gate_ptr, up_ptr, dh_stride, gate_stride, up_stride, num_rows, num_cols, limit,
    gate_z, gate_m, gate_zs, gate_ms, gate_mc, gate_scaling, GATE_RANK: tl.constexpr, GATE_BLOCK: tl.constexpr,
    up_z, up_m, up_zs, up_ms, up_mc, up_scaling, UP_RANK: tl.constexpr, UP_BLOCK: tl.constexpr,
    dh_z, dh_m, dh_zs, dh_ms, dh_mc, dh_scaling, DH_RANK: tl.constexpr, DH_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    # Writes dgate over gate, dup over up and h over dh.
    rows, columns = _rows_and_columns(num_cols, BLOCK_ROWS, BLOCK_COLS)
    mask = (rows < num_rows)[:, None] & (columns < num_cols)[None, :]
    dh_ptrs = _tile(dh_ptr, dh_stride, rows, columns)
    gate_ptrs = _tile(gate_ptr, gate_stride, rows, columns)
    up_ptrs = _tile(up_ptr, up_stride, rows, columns)
    dh = tl.load(dh_ptrs, mask=mask, other=0.0)
    gate = tl.load(gate_ptrs, mask=mask, other=0.0)
    up = tl.load(up_ptrs, mask=mask, other=0.0)
    dh = _plus_low_rank(
        dh, dh_z, dh_m, dh_zs, dh_ms, dh_mc, dh_scaling, rows, columns, num_rows, num_cols,
        DH_RANK, DH_BLOCK, PRECISION,
    )  # fmt: skip
    gate = _plus_low_rank(
        gate, gate_z, gate_m, gate_zs, gate_ms, gate_mc, gate_scaling, rows, columns, num_rows, num_cols,
        GATE_RANK, GATE_BLOCK, PRECISION,
    )  # fmt: skip
    up = _plus_low_rank(
        up, up_z, up_m, up_zs, up_ms, up_mc, up_scaling, rows, columns, num_rows, num_cols,
        UP_RANK, UP_BLOCK, PRECISION,
    )  # fmt: skip
    activation, derivative, factor, gate_passes, up_passes = gate_and_up(gate, up, 1.0, limit, 0.0, CLAMP, ACTIVATION)
    dgate, dup = dh * factor * derivative, dh * activation
    if CLAMP:
        dgate = tl.where(gate_passes, dgate, 0.0)
        dup = tl.where(up_passes, dup, 0.0)
    h = activation.to(dh_ptr.dtype.element_ty).to(tl.float32) * factor
    tl.store(dh_ptrs, h.to(dh_ptr.dtype.element_ty), mask=mask)
    tl.store(gate_ptrs, dgate.to(gate_ptr.dtype.element_ty), mask=mask)
    tl.store(up_ptrs, dup.to(up_ptr.dtype.element_ty), mask=mask)


def _arguments(update: LowRank | None, stand_in: torch.Tensor) -> tuple:
    """One update as the kernels take it; without one, nothing of `stand_in` is read."""
    if update is None:
        return stand_in, stand_in, 0, 0, 0, 1.0, 0, 16
    z, matrix, scaling = update
    rank = matrix.shape[0]
    block = max(16, next_power_of_2(rank))  # the least that a matmul takes
    return z, matrix, z.stride(0), *matrix.stride(), float(scaling), rank, block


def _launch(
    kernel, tensors: Sequence[torch.Tensor], updates: Sequence[LowRank | None], activation: str, limit: float
) -> None:
    first = tensors[0]
    rows, cols = first.shape
    if rows * cols == 0:
        return
    with on_device(first):
        kernel[(cdiv(rows, _BLOCK_ROWS) * cdiv(cols, _BLOCK_COLS),)](
            *tensors,
            *(x.stride(0) for x in tensors),
            *(rows, cols, limit),
            *(argument for update in updates for argument in _arguments(update, first)),
            ACTIVATION=activation,
            CLAMP=limit < math.inf,
            PRECISION="ieee" if first.dtype == torch.float32 else "tf32",
            BLOCK_ROWS=_BLOCK_ROWS,
            BLOCK_COLS=_BLOCK_COLS,
            num_warps=_NUM_WARPS,
        )


def launch_forward(
    gate: torch.Tensor,
    up: torch.Tensor,
    h: torch.Tensor,
    updates: Sequence[LowRank | None],
    activation: str,
    limit: float,
) -> None:
    """Writes `h` of (rows, columns) tensors; the updates are those of gate and of up."""
    _launch(_lora_gated_forward_kernel, (gate, up, h), updates, activation, limit)


def launch_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    updates: Sequence[LowRank | None],
    activation: str,
    limit: float,
) -> None:
    """Writes the gradients over `gate` and `up`, and h over `dh`; the updates are those of gate, of up and of dh."""
    _launch(_lora_gated_backward_kernel, (dh, gate, up), updates, activation, limit)
