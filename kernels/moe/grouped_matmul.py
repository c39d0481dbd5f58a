"""Products of rows with the weight of their expert, and the gradients of these weights.

With e the expert of row r, as in `ExpertRows`::

    rows       z_r  = x_r @ W_e^T + b_e + y_r @ V_e^T
    weights    dW_e = sum over the rows r of e of left_r^T right_r

An operand may have one row per token instead of one per choice. The thin second product (y, V) is how adapters join in.
Rows of no expert are never computed: what `grouped_rows` leaves there is undefined; `combine_rows` does not read it.

On Hopper and B200, torch's own grouped matmul is the fastest where it takes the operands. It knows neither rows read
through an index, nor a bias, nor a second product: a row per token is first repeated for every choice (`repeat_rows`,
one pass), and bias and second product are added to the result in another pass (`add_to_rows`). Elsewhere the Triton
kernels below do all of it in one pass.

Shapes: T tokens, k choices of each, R = T k rows sorted by expert, E experts; K columns that are summed, M and N
columns of a result, r rank.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch.nn import functional as F

from liger_trainer.kernels.moe.sort_by_expert import ExpertRows, tile_table
from liger_trainer.kernels.moe.token_rows import repeat_rows
from liger_trainer.kernels.rows import device_limits
from liger_trainer.kernels.runtime import INTERPRETED, cdiv, next_power_of_2, on_device, tl, triton, use_triton


class Tile(NamedTuple):
    """A launch configuration of one of the kernels."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_TURING = Tile(64, 128, 32, 4, 2)  # of half precision, on NVIDIA GPUs before Ampere; chosen to fit, not measured
_GROUP = 8  # tiles of rows that share the weights in L2
_ADD_ROWS, _ADD_COLUMNS, _ADD_RANKS = 64, 128, 64


def precision() -> str:
    """How fp32 operands are multiplied: as torch does. Once this was set, torch's older `allow_tf32` cannot be read."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# ---------------------------------------------------------------------------------------------------------------------
# Rows
#
# A program computes ROWS rows of one expert by COLUMNS of the result. The table of tiles has a fixed size, so the host
# need not know how many rows an expert has; programs of tiles past its end return at once. GROUP tiles of rows are
# multiplied by all columns before the next ones, so that they read their weights from L2.
#
# Rows past the last one of the expert are read as the last one (their products are not stored), so that the loop needs
# no mask where K is a multiple of DEPTH.
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _tile_of(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """The tile of rows and the tile of columns of a program."""
    first = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    return first + within % height, within // height


@triton.jit
def _load_weight(weight_base, column, depth, columns, depths, TRANSPOSED: tl.constexpr, EVEN_DEPTH: tl.constexpr):
    """A tile (DEPTH, COLUMNS) of one expert's weight; columns are those of the result."""
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


def rows_tile(dtype: torch.dtype, rows_an_expert: float, columns: int, before_ampere: bool = False) -> Tile:
    """The tile for a dtype, a mean number of rows per expert, columns of the result and the generation of GPUs.

    A thin result, such as that of adapters, gets a thin tile.
    """
    if INTERPRETED:
        return Tile(16, 32, 32, 4, 1)
    if columns <= 64:
        thin = max(16, next_power_of_2(columns))
        return Tile(64, thin, 32, 4, 3) if dtype == torch.float32 else Tile(64, thin, 64, 4, 4)
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 3)
    if before_ampere:
        return _TURING
    if rows_an_expert < 96:
        return Tile(64, 128, 64, 4, 4)
    return Tile(128, 256, 64, 8, 3)


def launch_rows(
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
    """`grouped_rows` by the Triton kernel, into `out`."""
    num_rows, columns = out.shape
    if out.numel() == 0:
        return
    experts, depths = weight.shape[0], x.shape[1]
    tile = tile or rows_tile(x.dtype, num_rows / experts, columns, device_limits(x.device).before_ampere)
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
            GROUP=_GROUP,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


@triton.jit
def _add_kernel(
    out_ptr,
    bias_ptr,
    y_ptr,
    v_ptr,
    offsets_ptr,
    tiles_ptr,
    columns,
    BIAS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column_tiles = tl.cdiv(columns, COLUMNS)
    row_tile = tl.program_id(0) // column_tiles
    expert = tl.load(tiles_ptr + 2 * row_tile).to(tl.int64)
    if expert < 0:
        return
    row = tl.load(tiles_ptr + 2 * row_tile + 1) + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    in_rows = row < tl.load(offsets_ptr + expert + 1)
    in_columns = column < columns
    exists = in_rows[:, None] & in_columns[None, :]
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    total = tl.load(out_ptrs, mask=exists, other=0.0).to(tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + expert * columns + column, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    for first_rank in range(0, RANK, RANK_BLOCK):
        rank = first_rank + tl.arange(0, RANK_BLOCK)
        in_rank = rank < RANK
        y_ptrs = y_ptr + row.to(tl.int64)[:, None] * RANK + rank[None, :]
        y = tl.load(y_ptrs, mask=in_rows[:, None] & in_rank[None, :], other=0.0)
        v_ptrs = v_ptr + (expert * columns + column)[None, :] * RANK + rank[:, None]
        v = tl.load(v_ptrs, mask=in_columns[None, :] & in_rank[:, None], other=0.0)
        total = tl.dot(y, v, total)
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=exists)


def add_to_rows(
    out: torch.Tensor,
    rows: ExpertRows,
    bias: torch.Tensor | None,
    extra: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Adds the bias and the second product of `grouped_rows` to its result `out` (R, N)."""
    if out.numel() == 0 or (bias is None and extra is None):
        return
    num_rows, columns = out.shape
    y, v = (out, out) if extra is None else (extra[0].contiguous(), extra[1].to(out.dtype).contiguous())
    rank = 0 if extra is None else y.shape[1]
    tiles = tile_table(rows.offsets, _ADD_ROWS, num_rows)
    with on_device(out):
        _add_kernel[(len(tiles) * cdiv(columns, _ADD_COLUMNS),)](
            out,
            out if bias is None else bias.contiguous(),
            y,
            v,
            rows.offsets,
            tiles,
            columns,
            BIAS=bias is not None,
            RANK=rank,
            RANK_BLOCK=min(_ADD_RANKS, max(16, next_power_of_2(rank))) if rank else 16,
            ROWS=_ADD_ROWS,
            COLUMNS=_ADD_COLUMNS,
            num_warps=4,
        )


def grouped_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: ExpertRows,
    *,
    top_k: int = 0,
    transposed: bool = False,
    bias: torch.Tensor | None = None,
    extra: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """``x_r @ weight_e.T`` for every row r of every expert e.

    Args:
        x: (R, K), one row per choice; with `top_k`, (T, K), one row per token.
        weight: (E, N, K), or (E, K, N) if `transposed`.
        rows: The R = T * k choices.
        top_k: Choices per token, where x has one row per token; otherwise 0.
        transposed: Whether the weight is stored as (E, K, N).
        bias: (E, N), added to the rows of its expert.
        extra: y (R, r) and V (E, N, r), whose product ``y_r @ V_e.T`` is added.

    Returns:
        (R, N) in x's dtype.
    """
    if library_takes(x, weight):
        operand = repeat_rows(x, rows, top_k) if top_k else x
        right = weight if transposed else weight.transpose(1, 2)
        out = F.grouped_mm(operand, right, offs=rows.offsets[1:])
        add_to_rows(out, rows, bias, extra)
        return out
    out = x.new_empty(rows.order.shape[0], weight.shape[2 if transposed else 1])
    grouped_rows_(out, x, weight, rows, top_k, transposed, bias, extra)
    return out


def grouped_rows_(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rows: ExpertRows,
    top_k: int,
    transposed: bool,
    bias: torch.Tensor | None,
    extra: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """`grouped_rows` into `out`, without torch's grouped matmul.

    `rows.offsets` may be those of some experts alone, which `weight`, `bias` and V then are of; other rows of `out` are
    left as they are.
    """
    if use_triton(x):
        launch_rows(out, x, weight, rows, top_k, transposed, bias, extra)
        return
    for expert, start, stop in _groups(rows):
        operand = x[rows.order[start:stop].long() // top_k] if top_k else x[start:stop]
        product = operand @ (weight[expert] if transposed else weight[expert].T)
        if bias is not None:
            product += bias[expert]
        if extra is not None:
            product += extra[0][start:stop] @ extra[1][expert].T
        out[start:stop] = product


# ---------------------------------------------------------------------------------------------------------------------
# Gradients of the weights
#
# A program computes one tile of one expert's gradient over all rows of that expert and writes it once; an expert
# without rows gets its zeros from the same store. Rows of the next expert, which a last step may reach, count as zeros.
# ---------------------------------------------------------------------------------------------------------------------


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


def weights_tile(dtype: torch.dtype, left_columns: int, before_ampere: bool = False) -> Tile:
    """The tile for a dtype and a generation of GPUs; a thin left operand, such as that of adapters, is thin."""
    if INTERPRETED:
        return Tile(16, 32, 16, 4, 1)
    if dtype == torch.float32:
        return Tile(64, 64, 32, 4, 3)
    if left_columns <= 64:
        return Tile(max(16, next_power_of_2(left_columns)), 128, 64, 4, 3)
    return _TURING if before_ampere else Tile(128, 256, 64, 8, 3)


def launch_weights(
    out: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    rows: ExpertRows,
    left_top_k: int,
    right_top_k: int,
    tile: Tile | None = None,
) -> None:
    """`grouped_weight_gradient` by the Triton kernel, into `out`."""
    experts, left_columns, right_columns = out.shape
    if out.numel() == 0:
        return
    tile = tile or weights_tile(left.dtype, left_columns, device_limits(left.device).before_ampere)
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


def grouped_weight_gradient(
    left: torch.Tensor,
    right: torch.Tensor,
    rows: ExpertRows,
    *,
    left_top_k: int = 0,
    right_top_k: int = 0,
) -> torch.Tensor:
    """The sum of ``left_r.T @ right_r`` over the rows r of each expert; zeros for an expert without rows.

    Args:
        left: (R, M), one row per choice; with `left_top_k`, (T, M), one row per token.
        right: (R, N), or with `right_top_k` (T, N).
        rows: The R choices.
        left_top_k: Choices per token, where `left` has one row per token; otherwise 0.
        right_top_k: The same for `right`.

    Returns:
        (E, M, N) in left's dtype.
    """
    if library_takes(left, right):
        left = repeat_rows(left, rows, left_top_k) if left_top_k else left
        right = repeat_rows(right, rows, right_top_k) if right_top_k else right
        return F.grouped_mm(left.t(), right, offs=rows.offsets[1:])
    out = left.new_empty(rows.offsets.shape[0] - 1, left.shape[1], right.shape[1])
    if use_triton(left):
        launch_weights(out, left, right, rows, left_top_k, right_top_k)
        return out
    out.zero_()
    for expert, start, stop in _groups(rows):
        indices = rows.order[start:stop].long()
        left_rows = left[indices // left_top_k] if left_top_k else left[start:stop]
        right_rows = right[indices // right_top_k] if right_top_k else right[start:stop]
        out[expert] = left_rows.T @ right_rows
    return out


# ---------------------------------------------------------------------------------------------------------------------
# torch's grouped matmul
# ---------------------------------------------------------------------------------------------------------------------


def library_takes(*operands: torch.Tensor) -> bool:
    """Whether torch's grouped matmul takes the operands: bf16, contiguous, rows of whole 16 bytes, on Hopper or B200.

    Both dimensions of a weight count, however it is multiplied: where rows of the result are not whole 16 bytes, torch
    pads them, and the result is not contiguous.
    """
    return all(
        x.is_cuda
        and x.numel() > 0
        and x.dtype == torch.bfloat16
        and x.is_contiguous()
        and all(size % 8 == 0 for size in x.shape[1:])
        and x.data_ptr() % 16 == 0
        for x in operands
    ) and _on_device(operands[0].device)


def _on_device(device: torch.device) -> bool:
    if torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)  # elsewhere torch multiplies expert by expert


def rows_of_choices(x: torch.Tensor, weight: torch.Tensor, rows: ExpertRows, top_k: int) -> tuple[torch.Tensor, int]:
    """`x` and its `top_k`; or its rows repeated once, and 0, where each product with `weight` would repeat them."""
    return (repeat_rows(x, rows, top_k), 0) if library_takes(x, weight) else (x, top_k)


def _groups(rows: ExpertRows) -> list[tuple[int, int, int]]:
    """(expert, first row, last row + 1) of each expert with rows."""
    offsets = rows.offsets.tolist()
    return [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(offsets)) if b > a]
