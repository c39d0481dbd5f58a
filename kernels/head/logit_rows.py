"""What kernels over rows of logits share: where a row lies, its tiles, and running sums of exponentials."""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import next_power_of_2, tl, triton


def row_view(logits: torch.Tensor) -> torch.Tensor:
    """`logits` as `(N, V)` or `(B, S, V)` with last stride 1; a copy only where its strides do not allow that."""
    if logits.dim() not in (2, 3):
        logits = logits.reshape(-1, logits.shape[-1])
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def row_layout(rows: torch.Tensor) -> tuple[int, int, int]:
    """(inner rows, outer stride, inner stride) of `(N, V)` or `(B, S, V)` rows whose last stride is 1."""
    if rows.dim() == 2:
        return max(rows.shape[0], 1), 0, rows.stride(0)
    return max(rows.shape[1], 1), rows.stride(0), rows.stride(1)


@triton.jit
def row_start(ptr, row, inner_rows, outer_stride, inner_stride):
    """Where row `row` of `ptr` starts; the rest is its `row_layout`."""
    return ptr + (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride


def row_config(width: int) -> tuple[int, int, int]:
    """Tile width, warps and pipeline stages for rows of `width` columns.

    Eight elements a thread are one 16-byte load in flight and leave registers for the running state; on an H200 wider
    tiles and pipelining were slower at every vocabulary tried, for one pass and for both.
    """
    block = min(4096, max(128, next_power_of_2(width)))
    return block, max(1, block // 256), 1


@triton.jit
def fold(total, value, decay, grows):
    """Adds `value`, weighted by its exponential, to a running sum whose maximum just moved where `grows`."""
    return tl.where(grows, total * decay + value, total + value * decay)
