"""The kernels of `latent.py`, which has the formula.

Shapes: kv (batch, seq, heads, nope + value), r (batch, seq, rope), k (batch, seq, heads, nope + rope).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.rope.rope_kernel import contiguous_columns
from liger_trainer.kernels.runtime import cdiv, has_elements, next_power_of_2, on_device, tl, triton

_TILE = 4096  # elements of a tile: with 4 warps, four loads of 16 bytes in flight in each thread


@triton.jit(do_not_specialize=["seq_len", "num_tokens"])
def expand_keys_kernel(
    kv_ptr,
    r_ptr,
    k_ptr,  # contiguous
    seq_len,
    num_tokens,  # batch * seq
    kv_stride_batch,
    kv_stride_seq,
    kv_stride_head,
    r_stride_batch,
    r_stride_seq,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
):
    """One program writes the keys of ROWS heads, which may be of several tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    batch, place = token // seq_len, token % seq_len
    rows = (token < num_tokens)[:, None]
    nope, rope = tl.arange(0, BLOCK_NOPE)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
    kv_row = kv_ptr + (batch * kv_stride_batch + place * kv_stride_seq + head * kv_stride_head)[:, None]
    r_row = r_ptr + (batch * r_stride_batch + place * r_stride_seq)[:, None]
    k_row = k_ptr + (row * (NOPE + ROPE))[:, None]
    # Both are loaded before one is stored, as in the rotation's kernel.
    own = tl.load(kv_row + nope, mask=rows & (nope < NOPE), other=0.0)
    shared = tl.load(r_row + rope, mask=rows & (rope < ROPE), other=0.0)
    tl.store(k_row + nope, own, mask=rows & (nope < NOPE))
    tl.store(k_row + NOPE + rope, shared.to(k_ptr.dtype.element_ty), mask=rows & (rope < ROPE))


@triton.jit(do_not_specialize=["seq_len"])
def collapse_keys_kernel(
    dk_ptr,
    dv_ptr,
    dkv_ptr,  # contiguous
    dr_ptr,  # contiguous
    seq_len,
    dk_stride_batch,
    dk_stride_seq,
    dk_stride_head,
    dv_stride_batch,
    dv_stride_seq,
    dv_stride_head,
    HEADS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_NOPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """One program has all heads of a token, so that their sum has one order."""
    token = tl.program_id(0).to(tl.int64)
    batch, place = token // seq_len, token % seq_len
    nope, rope = tl.arange(0, BLOCK_NOPE)[None, :], tl.arange(0, BLOCK_ROPE)[None, :]
    value = tl.arange(0, BLOCK_VALUE)[None, :]
    dk_ptr += batch * dk_stride_batch + place * dk_stride_seq
    dv_ptr += batch * dv_stride_batch + place * dv_stride_seq
    dkv_ptr += token * (HEADS * (NOPE + VALUE))
    total = tl.zeros((BLOCK_HEADS, BLOCK_ROPE), tl.float32)
    for start in range(0, HEADS, BLOCK_HEADS):
        head = (start + tl.arange(0, BLOCK_HEADS).to(tl.int64))[:, None]
        heads = head < HEADS
        dk_row, dv_row = dk_ptr + head * dk_stride_head, dv_ptr + head * dv_stride_head
        of_keys = tl.load(dk_row + nope, mask=heads & (nope < NOPE), other=0.0)
        of_values = tl.load(dv_row + value, mask=heads & (value < VALUE), other=0.0)
        total += tl.load(dk_row + NOPE + rope, mask=heads & (rope < ROPE), other=0.0).to(tl.float32)
        dkv_row = dkv_ptr + head * (NOPE + VALUE)
        tl.store(dkv_row + nope, of_keys, mask=heads & (nope < NOPE))
        tl.store(dkv_row + NOPE + value, of_values, mask=heads & (value < VALUE))
    column = tl.arange(0, BLOCK_ROPE)
    tl.store(dr_ptr + token * ROPE + column, tl.sum(total, 0).to(dr_ptr.dtype.element_ty), mask=column < ROPE)


def launch_expand(kv: torch.Tensor, r: torch.Tensor, k: torch.Tensor) -> None:
    """Writes `k`, which is contiguous; the others have any strides."""
    if not has_elements(k):
        return
    kv, r = contiguous_columns(kv), contiguous_columns(r)
    batch, seq_len, heads, size = k.shape
    rope = r.shape[-1]
    block = next_power_of_2(size - rope)
    rows = max(1, _TILE // max(block, next_power_of_2(rope)))
    with on_device(kv):
        expand_keys_kernel[(cdiv(batch * seq_len * heads, rows),)](
            kv,
            r,
            k,
            seq_len,
            batch * seq_len,
            *kv.stride()[:3],
            *r.stride()[:2],
            HEADS=heads,
            NOPE=size - rope,
            ROPE=rope,
            ROWS=rows,
            BLOCK_NOPE=block,
            BLOCK_ROPE=next_power_of_2(rope),
            num_warps=4,
        )


def launch_collapse(dk: torch.Tensor, dv: torch.Tensor, dkv: torch.Tensor, dr: torch.Tensor) -> None:
    """Writes `dkv` and `dr`, which are contiguous; the others have any strides."""
    if not has_elements(dkv):
        dr.zero_()
        return
    dk, dv = contiguous_columns(dk), contiguous_columns(dv)
    batch, seq_len, heads, size = dk.shape
    rope, value = dr.shape[-1], dv.shape[-1]
    blocks = [next_power_of_2(each) for each in (size - rope, rope, value)]
    block_heads = min(next_power_of_2(heads), max(1, _TILE // max(blocks)))
    with on_device(dk):
        collapse_keys_kernel[(batch * seq_len,)](
            dk,
            dv,
            dkv,
            dr,
            seq_len,
            *dk.stride()[:3],
            *dv.stride()[:3],
            HEADS=heads,
            NOPE=size - rope,
            ROPE=rope,
            VALUE=value,
            BLOCK_HEADS=block_heads,
            BLOCK_NOPE=blocks[0],
            BLOCK_ROPE=blocks[1],
            BLOCK_VALUE=blocks[2],
            num_warps=4,
        )
