"""Grouped products by torch's own grouped matmul, the fastest there is on Hopper where it takes the operands.

It knows neither rows that are read through an index, nor a bias, nor a second product. So a row a token becomes a row a
choice first (`repeat_rows`, one pass), and bias and second product are added to the result in another.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from liger_trainer.kernels.moe.routing import ExpertRows, tile_table
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, on_device, tl, triton

grouped_mm = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_ROWS, _COLUMNS, _RANKS = 64, 128, 64
_MAX_BLOCK = 2048


def takes(*operands: torch.Tensor) -> bool:
    """Whether the grouped matmul takes these operands: bf16, contiguous, rows of whole 16 bytes, on Hopper or B200.

    Both sides of a weight count, whichever way it is multiplied: torch pads a result of other rows, which then is not
    contiguous.
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
    if grouped_mm is None or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)  # on others torch multiplies expert by expert


@triton.jit
def _repeat_kernel(x_ptr, slots_ptr, out_ptr, columns, x_stride, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < columns
    row = tl.load(x_ptr + token * x_stride + column, mask=exists)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + choice).to(tl.int64)
        tl.store(out_ptr + slot * columns + column, row, mask=exists)


def repeat_rows(x: torch.Tensor, rows: ExpertRows, top_k: int) -> torch.Tensor:
    """(R, K), the row of the token of every choice, of x (T, K)."""
    out = x.new_empty(rows.order.shape[0], x.shape[1])
    if out.numel():
        block = min(next_power_of_2(x.shape[1]), _MAX_BLOCK)
        with on_device(x):
            _repeat_kernel[(x.shape[0], cdiv(x.shape[1], block))](
                x, rows.slots, out, x.shape[1], x.stride(0), TOP_K=top_k, BLOCK=block, num_warps=4
            )
    return out


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
    """Adds the bias and the second product of `grouped_rows` to its result."""
    if out.numel() == 0 or (bias is None and extra is None):
        return
    num_rows, columns = out.shape
    y, v = (out, out) if extra is None else (extra[0].contiguous(), extra[1].to(out.dtype).contiguous())
    rank = 0 if extra is None else y.shape[1]
    tiles = tile_table(rows.offsets, _ROWS, num_rows)
    with on_device(out):
        _add_kernel[(len(tiles) * cdiv(columns, _COLUMNS),)](
            out,
            out if bias is None else bias.contiguous(),
            y,
            v,
            rows.offsets,
            tiles,
            columns,
            BIAS=bias is not None,
            RANK=rank,
            RANK_BLOCK=min(_RANKS, max(16, next_power_of_2(rank))) if rank else 16,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            num_warps=4,
        )
