"""The kernel of `_grouped_matmul.combine_rows`: a program sums the k rows of one token, in the order of its choices."""

from __future__ import annotations

import torch

from liger_trainer.kernels.moe.routing import ExpertRows
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, on_device, tl, triton

MAX_BLOCK = 2048


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


def launch(y: torch.Tensor, rows: ExpertRows, top_k: int, weights: torch.Tensor | None) -> torch.Tensor:
    """As `combine_rows`."""
    tokens, columns = rows.slots.shape[0] // top_k, y.shape[1]
    out = y.new_empty(tokens, columns)
    if out.numel() == 0:
        return out
    block = min(next_power_of_2(columns), MAX_BLOCK)
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
