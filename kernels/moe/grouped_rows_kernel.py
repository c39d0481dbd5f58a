"""The Triton kernel of `_grouped_matmul.grouped_rows`.

A tile is ROWS rows of one expert by COLUMNS of the result. The table of tiles has a fixed size, so that the host need
not know how many rows an expert has; programs of tiles past its end leave at once. GROUP tiles of rows are multiplied
by all columns before the next, so that the weights they share are read from L2.

Rows past the last of their expert are read as its last (their products are not stored), so that the steps of the
loop need no mask where K is a multiple of DEPTH.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.moe.routing import ExpertRows, tile_table
from liger_trainer.kernels.runtime import INTERPRETED, cdiv, next_power_of_2, on_device, tl, triton


class Tile(NamedTuple):
    """A launch configuration."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


GROUP = 8


@triton.jit
def _tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Which tile of rows and of columns a program computes."""
    first = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    return first + within % height, within // height


@triton.jit
def _load_weight(weight_base, column, depth, columns, depths, TRANSPOSED: tl.constexpr, EVEN_DEPTH: tl.constexpr):
    """Columns of the result by steps of the sum, (DEPTH, COLUMNS), of one expert's weight."""
    if TRANSPOSED:
        pointers = weight_base + depth.to(tl.int64)[:, None] * columns + column[None, :]
    else:
        pointers = weight_base + column.to(tl.int64)[None, :] * depths + depth[:, None]
    if EVEN_DEPTH:
        return tl.load(pointers)
    return tl.load(pointers, mask=depth[:, None] < depths, other=0.0)


@triton.jit
def _grouped_rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    v_ptr,
    order_ptr,
    offsets_ptr,
    tiles_ptr,
    out_ptr,
    row_tiles,
    columns,
    depths,
    x_stride,
    TOP_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    EVEN_DEPTH: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    row_tile, column_tile = _tile_of(tl.program_id(0), row_tiles, tl.cdiv(columns, COLUMNS), GROUP)
    expert = tl.load(tiles_ptr + 2 * row_tile).to(tl.int64)
    if expert < 0:
        return
    first = tl.load(tiles_ptr + 2 * row_tile + 1)
    end = tl.load(offsets_ptr + expert + 1)
    row = first + tl.arange(0, ROWS)
    clamped = tl.minimum(row, end - 1)
    source = tl.load(order_ptr + clamped) // TOP_K if TOP_K > 0 else clamped
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    clamped_column = column if EVEN_COLUMNS else tl.minimum(column, columns - 1)
    depth = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + source.to(tl.int64)[:, None] * x_stride + depth[None, :]
    weight_base = weight_ptr + expert * columns * depths
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, tl.cdiv(depths, DEPTH)):
        k = step * DEPTH + depth
        x = tl.load(x_ptrs) if EVEN_DEPTH else tl.load(x_ptrs, mask=k[None, :] < depths, other=0.0)
        weight = _load_weight(weight_base, clamped_column, k, columns, depths, TRANSPOSED, EVEN_DEPTH)
        total = tl.dot(x, weight, total, input_precision=PRECISION)
        x_ptrs += DEPTH
    for first_rank in range(0, RANK, RANK_BLOCK):
        rank = first_rank + tl.arange(0, RANK_BLOCK)
        in_rank = rank < RANK
        y = tl.load(y_ptr + clamped.to(tl.int64)[:, None] * RANK + rank[None, :], mask=in_rank[None, :], other=0.0)
        v_ptrs = v_ptr + (expert * columns + clamped_column)[None, :] * RANK + rank[:, None]
        v = tl.load(v_ptrs, mask=in_rank[:, None], other=0.0)
        total = tl.dot(y, v, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + expert * columns + clamped_column).to(tl.float32)[None, :]
    exists = (row < end)[:, None] & (column < columns)[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=exists)


def tile_for(dtype: torch.dtype, rows_an_expert: float, columns: int) -> Tile:
    """The launch configuration for a dtype, the mean number of rows of an expert and the columns of the result.

    A thin result, as of adapters, gets a thin tile.
    """
    if INTERPRETED:
        return Tile(16, 32, 32, 4, 1)
    if columns <= 64:
        thin = max(16, next_power_of_2(columns))
        return Tile(64, thin, 32, 4, 3) if dtype == torch.float32 else Tile(64, thin, 64, 4, 4)
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 3)
    if rows_an_expert < 96:
        return Tile(64, 128, 64, 4, 4)
    return Tile(128, 256, 64, 8, 3)


def precision() -> str:
    """How fp32 operands are multiplied: as torch does. Its older `allow_tf32` cannot be read once this was set."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def launch(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: ExpertRows,
    top_k: int,
    transposed: bool,
    bias: torch.Tensor | None,
    extra: tuple[torch.Tensor, torch.Tensor] | None,
    tile: Tile | None = None,
) -> None:
    """As `grouped_rows`, into `out`."""
    num_rows, columns = out.shape
    if out.numel() == 0:
        return
    experts, depths = weight.shape[0], x.shape[1]
    tile = tile or tile_for(x.dtype, num_rows / experts, columns)
    y, v = (x, x) if extra is None else (extra[0].contiguous(), extra[1].to(x.dtype).contiguous())
    rank = 0 if extra is None else y.shape[1]
    row_tiles = cdiv(num_rows, tile.rows) + experts
    with on_device(x):
        tiles = tile_table(rows.offsets, tile.rows, num_rows)
        _grouped_rows_kernel[(row_tiles * cdiv(columns, tile.columns),)](
            x,
            weight.contiguous(),
            x if bias is None else bias.contiguous(),
            y,
            v,
            rows.order,
            rows.offsets,
            tiles,
            out,
            row_tiles,
            columns,
            depths,
            x.stride(0),
            TOP_K=top_k,
            TRANSPOSED=transposed,
            BIAS=bias is not None,
            RANK=rank,
            RANK_BLOCK=min(tile.depth, max(16, next_power_of_2(rank))) if rank else 16,  # as much memory as a step
            EVEN_DEPTH=depths % tile.depth == 0,
            EVEN_COLUMNS=columns % tile.columns == 0,
            PRECISION=precision(),
            GROUP=GROUP,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
