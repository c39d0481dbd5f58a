"""The Triton kernels of the embedding and their launches; what they do together is in ``embedding.py``."""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton


@triton.jit
def _gather_kernel(ids_ptr, weight_ptr, out_ptr, vocab, cols, weight_stride, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < cols
    row = tl.load(ids_ptr + token).to(tl.int64)
    out_row_ptr = out_ptr + token * cols
    if (row >= 0) & (row < vocab):
        values = tl.load(weight_ptr + row * weight_stride + columns, mask=mask)
        tl.store(out_row_ptr + columns, values, mask=mask)
    else:  # an id that the table does not have reads nothing and shows
        tl.store(out_row_ptr + columns, tl.full((BLOCK,), float("nan"), out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _keys_kernel(ids_ptr, keys_ptr, tokens, vocab, padding_idx, BLOCK: tl.constexpr):
    """The ids in 32 bits, half the passes of a 64-bit sort; -1 for what has no gradient."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < tokens
    ids = tl.load(ids_ptr + offsets, mask=mask, other=-1)
    counts = (ids >= 0) & (ids < vocab) & (ids != padding_idx)
    tl.store(keys_ptr + offsets, tl.where(counts, ids, -1).to(tl.int32), mask=mask)


@triton.jit
def _write_row(grad_row_ptr, columns, total, mask, ACCUMULATE: tl.constexpr):
    if ACCUMULATE:
        total += tl.load(grad_row_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(grad_row_ptr + columns, total.to(grad_row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _sum_runs_kernel(
    dy_ptr,
    keys_ptr,
    order_ptr,
    grad_ptr,
    partial_ptr,
    tokens,
    cols,
    dy_stride,
    grad_stride,
    ACCUMULATE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up TOKENS sorted tokens, run by run of equal keys.

    A run that lies inside the block is a row of the gradient. Of one that goes beyond, the block's share is put aside:
    in slot 0 if the run began before the block, else in slot 1.
    """
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < cols
    start = block * TOKENS
    following = start + TOKENS
    key = tl.load(keys_ptr + start)
    before = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1)
    begun = (key != before).to(tl.int32)  # whether the run began in this block
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(TOKENS):  # beyond the last token the keys are -1
        position = start + i
        after = tl.load(keys_ptr + position + 1, mask=position + 1 < tokens, other=-1)
        if key >= 0:
            row = tl.load(order_ptr + position)
            total += tl.load(dy_ptr + row * dy_stride + columns, mask=mask, other=0.0).to(tl.float32)
        ends = after != key
        if (key >= 0) & (ends | (position + 1 == following)):
            if ends & (begun == 1):
                _write_row(grad_ptr + key.to(tl.int64) * grad_stride, columns, total, mask, ACCUMULATE)
            else:
                tl.store(partial_ptr + (2 * block + begun) * cols + columns, total, mask=mask)
        total = tl.where(ends, 0.0, total)
        begun = tl.where(ends, 1, begun)
        key = after


@triton.jit
def _join_runs_kernel(
    keys_ptr,
    grad_ptr,
    partial_ptr,
    tokens,
    cols,
    grad_stride,
    ACCUMULATE: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up the shares of the run that begins in this block and goes on in the next; most blocks have none."""
    block = tl.program_id(0).to(tl.int64)
    start = block * TOKENS
    following = start + TOKENS
    if following >= tokens:
        return
    key = tl.load(keys_ptr + following - 1)
    after = tl.load(keys_ptr + following)
    before = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1)
    if (key < 0) | (key != after) | (key == before):
        return
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < cols
    total = tl.load(partial_ptr + (2 * block + 1) * cols + columns, mask=mask, other=0.0)
    rest = tl.zeros((ROWS, BLOCK), tl.float32)
    first = block + 1
    while after == key:
        blocks = first + tl.arange(0, ROWS)
        theirs = tl.load(keys_ptr + blocks * TOKENS, mask=blocks * TOKENS < tokens, other=-1) == key
        shares = partial_ptr + (2 * blocks[:, None]) * cols + columns[None, :]
        rest += tl.load(shares, mask=theirs[:, None] & mask[None, :], other=0.0)
        first += ROWS
        after = tl.load(keys_ptr + first * TOKENS, mask=first * TOKENS < tokens, other=-1)
    total += tl.sum(rest, axis=0)
    _write_row(grad_ptr + key.to(tl.int64) * grad_stride, columns, total, mask, ACCUMULATE)


def _config(element_size: int) -> tuple[int, int, int]:
    """(columns a program, warps, tokens a program): 16 bytes a thread; small programs, so that many are in flight."""
    return (512, 2, 32) if element_size == 2 else (512, 4, 32)


def launch_gather(ids: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Writes the rows `ids` (tokens,) of `weight` to `out` (tokens, hidden), both with contiguous columns."""
    tokens, cols = out.shape
    if tokens * cols == 0:
        return
    block, num_warps, _ = _config(weight.element_size())
    grid = (tokens, cdiv(cols, block))
    with on_device(weight):
        _gather_kernel[grid](ids, weight, out, len(weight), cols, weight.stride(0), BLOCK=block, num_warps=num_warps)


def launch_backward(
    dy: torch.Tensor, ids: torch.Tensor, grad: torch.Tensor, padding_idx: int, accumulate: bool
) -> None:
    """Writes, or adds, the sums of the rows of `dy` (tokens, hidden) with equal ids to those rows of `grad`."""
    tokens, cols = dy.shape
    if tokens * cols == 0:
        return
    block, num_warps, tokens_a_program = _config(dy.element_size())
    keys = torch.empty(tokens, dtype=torch.int32, device=dy.device)
    with on_device(dy):
        _keys_kernel[(cdiv(tokens, 1024),)](ids, keys, tokens, len(grad), padding_idx, BLOCK=1024, num_warps=4)
        keys, order = torch.sort(keys, stable=True)
        blocks = cdiv(tokens, tokens_a_program)
        partial = torch.empty((blocks, 2, cols), dtype=torch.float32, device=dy.device)
        grid = (blocks, cdiv(cols, block))
        constants = {"ACCUMULATE": accumulate, "TOKENS": tokens_a_program, "BLOCK": block, "num_warps": num_warps}
        _sum_runs_kernel[grid](dy, keys, order, grad, partial, tokens, cols, dy.stride(0), grad.stride(0), **constants)
        _join_runs_kernel[grid](keys, grad, partial, tokens, cols, grad.stride(0), ROWS=16, **constants)
