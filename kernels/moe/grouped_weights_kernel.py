"""The Triton kernel of `_grouped_matmul.grouped_weight_gradient`.

A program computes one tile of one expert's gradient, over all rows of that expert, and writes it once: an expert
without rows gets its zeros from the same store. Rows of the next expert, which a last step reaches into, are zeros.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.moe.grouped_rows_kernel import Tile, precision
from liger_trainer.kernels.moe.routing import ExpertRows
from liger_trainer.kernels.runtime import INTERPRETED, cdiv, on_device, tl, triton


@triton.jit
def _grouped_weights_kernel(
    left_ptr,
    right_ptr,
    order_ptr,
    offsets_ptr,
    out_ptr,
    left_columns,
    right_columns,
    left_stride,
    right_stride,
    LEFT_TOP_K: tl.constexpr,
    RIGHT_TOP_K: tl.constexpr,
    EVEN_LEFT: tl.constexpr,
    EVEN_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,  # of the gradient: columns of the left operand
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row_tiles = tl.cdiv(left_columns, ROWS)
    column_tiles = tl.cdiv(right_columns, COLUMNS)
    program = tl.program_id(0)
    expert = (program // (row_tiles * column_tiles)).to(tl.int64)
    within = program % (row_tiles * column_tiles)
    left_column = within % row_tiles * ROWS + tl.arange(0, ROWS)
    right_column = within // row_tiles * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(start, end, DEPTH):
        row = first + tl.arange(0, DEPTH)
        exists = row < end
        left_row = tl.load(order_ptr + row, mask=exists, other=0) // LEFT_TOP_K if LEFT_TOP_K > 0 else row
        right_row = tl.load(order_ptr + row, mask=exists, other=0) // RIGHT_TOP_K if RIGHT_TOP_K > 0 else row
        left_exists = exists[:, None] if EVEN_LEFT else exists[:, None] & (left_column < left_columns)[None, :]
        right_exists = exists[:, None] if EVEN_RIGHT else exists[:, None] & (right_column < right_columns)[None, :]
        left = tl.load(
            left_ptr + left_row.to(tl.int64)[:, None] * left_stride + left_column[None, :], mask=left_exists, other=0.0
        )
        right = tl.load(
            right_ptr + right_row.to(tl.int64)[:, None] * right_stride + right_column[None, :],
            mask=right_exists,
            other=0.0,
        )
        total = tl.dot(tl.trans(left), right, total, input_precision=PRECISION)
    out_ptrs = out_ptr + (expert * left_columns + left_column)[:, None] * right_columns + right_column[None, :]
    in_gradient = (left_column < left_columns)[:, None] & (right_column < right_columns)[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=in_gradient)


def tile_for(dtype: torch.dtype, left_columns: int) -> Tile:
    """The launch configuration for a dtype; a thin operand, as of adapters, gets a thin tile."""
    if INTERPRETED:
        return Tile(16, 32, 16, 4, 1)
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 3)
    if left_columns <= 64:
        return Tile(max(16, 1 << (left_columns - 1).bit_length()), 128, 64, 4, 3)
    return Tile(128, 256, 64, 8, 3)


def launch(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    rows: ExpertRows,
    left_top_k: int,
    right_top_k: int,
    tile: Tile | None = None,
) -> None:
    """As `grouped_weight_gradient`, into `out`."""
    experts, left_columns, right_columns = out.shape
    if out.numel() == 0:
        return
    tile = tile or tile_for(left.dtype, left_columns)
    with on_device(left):
        _grouped_weights_kernel[(experts * cdiv(left_columns, tile.rows) * cdiv(right_columns, tile.columns),)](
            left,
            right,
            rows.order,
            rows.offsets,
            out,
            left_columns,
            right_columns,
            left.stride(0),
            right.stride(0),
            LEFT_TOP_K=left_top_k,
            RIGHT_TOP_K=right_top_k,
            EVEN_LEFT=left_columns % tile.rows == 0,
            EVEN_RIGHT=right_columns % tile.columns == 0,
            PRECISION=precision(),
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
