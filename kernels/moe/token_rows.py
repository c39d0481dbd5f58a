"""Rows of tokens repeated for their k choices, and the rows of the choices summed per token.

::

    repeat     x'_slot(t, j) = x_t
    combine    o_t = sum over j of w_tj * y_slot(t, j)

A program handles one token. Sums are in fp32, in the order of the choices and without atomics, so that two runs agree
bit for bit. Bytes moved in bf16 for T tokens and H columns: 2 T H (k + 1), in either direction.

Shapes: T tokens, k choices of each, R = T k rows sorted by expert, E experts, H columns.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.moe.sort_by_expert import ExpertRows
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, on_device, tl, triton, use_triton

_MAX_BLOCK = 2048


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
    """The row of each choice's token, (R, H), of x (T, H)."""
    out = x.new_empty(rows.order.shape[0], x.shape[1])
    if out.numel():
        block = min(next_power_of_2(x.shape[1]), _MAX_BLOCK)
        with on_device(x):
            _repeat_kernel[(x.shape[0], cdiv(x.shape[1], block))](
                x, rows.slots, out, x.shape[1], x.stride(0), TOP_K=top_k, BLOCK=block, num_warps=4
            )
    return out


@triton.jit
def _combine_kernel(
    y_ptr,
    slots_ptr,
    end_ptr,
    weights_ptr,
    out_ptr,
    columns,
    TOP_K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < columns
    end = tl.load(end_ptr)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + token * TOP_K + choice)
        readable = tl.where(slot < end, columns, 0)
        row = tl.load(y_ptr + slot.to(tl.int64) * columns + column, mask=column < readable, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights_ptr + token * TOP_K + choice, mask=slot < end, other=0.0).to(tl.float32)
        total += row
    tl.store(out_ptr + token * columns + column, total.to(out_ptr.dtype.element_ty), mask=exists)


def combine_rows(y: torch.Tensor, rows: ExpertRows, top_k: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each token's rows, in fp32 and rounded once; rows of no expert count as zeros.

    Args:
        y: (R, H).
        rows: The R = T * top_k choices.
        top_k: Choices per token.
        weights: (T, top_k), a factor for each row; None for ones.

    Returns:
        (T, H) in y's dtype.
    """
    tokens, columns = rows.slots.shape[0] // top_k, y.shape[1]
    if use_triton(y):
        out = y.new_empty(tokens, columns)
        if out.numel():
            block = min(next_power_of_2(columns), _MAX_BLOCK)
            with on_device(y):
                _combine_kernel[(tokens, cdiv(columns, block))](
                    y.contiguous(),
                    rows.slots,
                    rows.offsets[-1:],
                    y if weights is None else weights.contiguous(),
                    out,
                    columns,
                    TOP_K=top_k,
                    WEIGHTED=weights is not None,
                    BLOCK=block,
                    num_warps=4,
                )
        return out
    slots = rows.slots.long()
    exists = (slots < rows.offsets[-1]).unsqueeze(1)
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    chosen = y[slots].to(wide)
    if weights is not None:
        chosen = chosen * weights.reshape(-1, 1).to(wide)
    chosen = torch.where(exists, chosen, 0.0)
    return chosen.view(tokens, top_k, columns).sum(1).to(y.dtype)
