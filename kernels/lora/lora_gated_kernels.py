"""Kernels of gated activations for projections to which the products of their adapters are still to be added.

An adapter's product ``s z @ B^T`` has as many elements as the projection it belongs to, but few multiplications for
each. A matmul that adds it reads and writes them all once more; here each program has its tile in registers anyway and
adds

    gate + s z_g @ B_g^T        up + s z_u @ B_u^T        and, in the backward,        dh + dz @ A

by one small matmul over the rank, without rounding. A program walks down a block of columns: it loads the adapters'
matrices once, and prefetches the next tiles while it computes one. The formulas are those of
`kernels/mlp/gated_activation.py`.

Shapes: rows tokens, cols intermediate size, rank of an adapter: gate (rows, cols), z (rows, rank), a matrix (rank,
cols).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.mlp.gated_activation import gate_and_up
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, num_sms, on_device, tl, triton

MAX_RANK = 128


class LowRank(NamedTuple):
    """The product ``scaling * z @ matrix``.

    Args:
        z: (rows, rank), in the dtype of the activations, with contiguous columns.
        matrix: (rank, cols), of any floating dtype and strides.
        scaling: The factor.
    """

    z: torch.Tensor
    matrix: torch.Tensor
    scaling: float


class LaunchConfig(NamedTuple):
    """How a kernel runs: its tile, warps, prefetched tiles, and programs per multiprocessor."""

    block_rows: int
    block_cols: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


_FORWARD = LaunchConfig(16, 128, 4, 3, 16)
_BACKWARD = LaunchConfig(16, 128, 4, 3, 16)  # measured on an H200, bf16, rank 16
_MATRIX_BYTES = (
    8192  # of one adapter's matrix in one block of columns; three of them fit in shared memory beside the tiles
)


@triton.jit
def _tile(ptr, row_stride, rows, columns):
    return ptr + rows.to(tl.int64)[:, None] * row_stride + columns[None, :]


@triton.jit
def _load_matrix(
    z_ptr, m_ptr, m_row_stride, m_col_stride, scaling, columns, num_cols, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr
):
    """These columns of ``scaling * matrix``, in the dtype of z."""
    ranks = tl.arange(0, BLOCK_RANK)
    mask = (ranks < RANK)[:, None] & (columns < num_cols)[None, :]
    matrix = tl.load(m_ptr + ranks[:, None] * m_row_stride + columns[None, :] * m_col_stride, mask=mask, other=0.0)
    return (matrix.to(tl.float32) * scaling).to(z_ptr.dtype.element_ty)


@triton.jit
def _plus_product(
    tile, z_ptr, z_stride, matrix, rows, num_rows,
    RANK: tl.constexpr, BLOCK_RANK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``tile + z @ matrix``, in fp32."""
    tile = tile.to(tl.float32)
    if RANK > 0:
        ranks = tl.arange(0, BLOCK_RANK)
        mask = (rows < num_rows)[:, None] & (ranks < RANK)[None, :]
        z = tl.load(_tile(z_ptr, z_stride, rows, ranks), mask=mask, other=0.0)
        tile = tl.dot(z, matrix, acc=tile, input_precision=PRECISION)
    return tile


@triton.jit
def _lora_gated_forward_kernel(
    gate_ptr, up_ptr, h_ptr, gate_stride, up_stride, h_stride, num_rows, num_cols, limit,
    gate_z, gate_m, gate_zs, gate_ms, gate_mc, gate_scaling, GATE_RANK: tl.constexpr, GATE_BLOCK: tl.constexpr,
    up_z, up_m, up_zs, up_ms, up_mc, up_scaling, UP_RANK: tl.constexpr, UP_BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr, CLAMP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(num_cols, BLOCK_COLS)
    columns = (tl.program_id(0) % across) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    start, step = tl.program_id(0) // across, tl.num_programs(0) // across
    gate_matrix = _load_matrix(gate_z, gate_m, gate_ms, gate_mc, gate_scaling, columns, num_cols, GATE_RANK, GATE_BLOCK)
    up_matrix = _load_matrix(up_z, up_m, up_ms, up_mc, up_scaling, columns, num_cols, UP_RANK, UP_BLOCK)
    for block in tl.range(start, tl.cdiv(num_rows, BLOCK_ROWS), step, num_stages=NUM_STAGES):
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < num_rows)[:, None] & (columns < num_cols)[None, :]
        gate = tl.load(_tile(gate_ptr, gate_stride, rows, columns), mask=mask, other=0.0)
        up = tl.load(_tile(up_ptr, up_stride, rows, columns), mask=mask, other=0.0)
        gate = _plus_product(gate, gate_z, gate_zs, gate_matrix, rows, num_rows, GATE_RANK, GATE_BLOCK, PRECISION)
        up = _plus_product(up, up_z, up_zs, up_matrix, rows, num_rows, UP_RANK, UP_BLOCK, PRECISION)
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
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    # Writes dgate over gate, dup over up and h over dh.
    across = tl.cdiv(num_cols, BLOCK_COLS)
    columns = (tl.program_id(0) % across) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    start, step = tl.program_id(0) // across, tl.num_programs(0) // across
    gate_matrix = _load_matrix(gate_z, gate_m, gate_ms, gate_mc, gate_scaling, columns, num_cols, GATE_RANK, GATE_BLOCK)
    up_matrix = _load_matrix(up_z, up_m, up_ms, up_mc, up_scaling, columns, num_cols, UP_RANK, UP_BLOCK)
    dh_matrix = _load_matrix(dh_z, dh_m, dh_ms, dh_mc, dh_scaling, columns, num_cols, DH_RANK, DH_BLOCK)
    for block in tl.range(start, tl.cdiv(num_rows, BLOCK_ROWS), step, num_stages=NUM_STAGES):
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        mask = (rows < num_rows)[:, None] & (columns < num_cols)[None, :]
        dh_ptrs = _tile(dh_ptr, dh_stride, rows, columns)
        gate_ptrs = _tile(gate_ptr, gate_stride, rows, columns)
        up_ptrs = _tile(up_ptr, up_stride, rows, columns)
        dh = tl.load(dh_ptrs, mask=mask, other=0.0)
        gate = tl.load(gate_ptrs, mask=mask, other=0.0)
        up = tl.load(up_ptrs, mask=mask, other=0.0)
        dh = _plus_product(dh, dh_z, dh_zs, dh_matrix, rows, num_rows, DH_RANK, DH_BLOCK, PRECISION)
        gate = _plus_product(gate, gate_z, gate_zs, gate_matrix, rows, num_rows, GATE_RANK, GATE_BLOCK, PRECISION)
        up = _plus_product(up, up_z, up_zs, up_matrix, rows, num_rows, UP_RANK, UP_BLOCK, PRECISION)
        activation, derivative, factor, gate_passes, up_passes = gate_and_up(
            gate, up, 1.0, limit, 0.0, CLAMP, ACTIVATION
        )
        dgate, dup = dh * factor * derivative, dh * activation
        if CLAMP:
            dgate = tl.where(gate_passes, dgate, 0.0)
            dup = tl.where(up_passes, dup, 0.0)
        h = activation.to(dh_ptr.dtype.element_ty).to(tl.float32) * factor
        tl.store(dh_ptrs, h.to(dh_ptr.dtype.element_ty), mask=mask)
        tl.store(gate_ptrs, dgate.to(gate_ptr.dtype.element_ty), mask=mask)
        tl.store(up_ptrs, dup.to(up_ptr.dtype.element_ty), mask=mask)


def _block_rank(update: LowRank | None) -> int:
    return max(16, next_power_of_2(update.matrix.shape[0])) if update else 16  # the smallest rank that tl.dot takes


def _arguments(update: LowRank | None, unused: torch.Tensor) -> tuple[torch.Tensor | int | float, ...]:
    """The arguments of one update; without an update, the kernels get `unused` and do not read it."""
    if update is None:
        return unused, unused, 0, 0, 0, 1.0, 0, _block_rank(None)
    z, matrix, scaling = update
    return z, matrix, z.stride(0), *matrix.stride(), float(scaling), matrix.shape[0], _block_rank(update)


def _fitting(config: LaunchConfig, updates: Sequence[LowRank | None], element_size: int) -> LaunchConfig:
    """`config` with fewer columns where ranks or elements are large."""
    columns = _MATRIX_BYTES // (element_size * max(map(_block_rank, updates)))
    return config._replace(block_cols=min(config.block_cols, columns))


def _launch(
    kernel: Any,
    config: LaunchConfig,
    tensors: Sequence[torch.Tensor],
    updates: Sequence[LowRank | None],
    activation: str,
    limit: float,
) -> None:
    first = tensors[0]
    rows, cols = first.shape
    if rows * cols == 0:
        return
    config = _fitting(config, updates, first.element_size())
    across, down = cdiv(cols, config.block_cols), cdiv(rows, config.block_rows)
    programs = max(1, min(down, num_sms(first.device) * config.programs_per_sm // across))  # of a block of columns
    with on_device(first):
        kernel[(across * programs,)](
            *tensors,
            *(x.stride(0) for x in tensors),
            *(rows, cols, limit),
            *(argument for update in updates for argument in _arguments(update, first)),
            ACTIVATION=activation,
            CLAMP=limit < math.inf,
            PRECISION="ieee" if first.dtype == torch.float32 else "tf32",
            BLOCK_ROWS=config.block_rows,
            BLOCK_COLS=config.block_cols,
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
        )


def launch_forward(
    gate: torch.Tensor,
    up: torch.Tensor,
    h: torch.Tensor,
    updates: Sequence[LowRank | None],
    activation: str,
    limit: float,
) -> None:
    """Writes `h`; all tensors are (rows, columns), and the updates are those of gate and up."""
    _launch(_lora_gated_forward_kernel, _FORWARD, (gate, up, h), updates, activation, limit)


def launch_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    updates: Sequence[LowRank | None],
    activation: str,
    limit: float,
) -> None:
    """Writes the gradients over `gate` and `up`, and h over `dh`; the updates are those of gate, up and dh."""
    _launch(_lora_gated_backward_kernel, _BACKWARD, (dh, gate, up), updates, activation, limit)
