"""The rotation kernel and its launch; the formula is in `rope`, and the functions are in `rope` and `layouts`.

Two choices describe a layout. *Pairs* says where the two members of a pair lie in a head, in the input and in the
output; *table* says which entries of the cosines and sines belong to a pair:

=============================  =========================================================================
pairs                          members of pair j
=============================  =========================================================================
``"halves"``                   j and j + rotary_dim / 2
``"interleaved"``              2 j and 2 j + 1
``"interleaved to halves"``    read as interleaved, written as halves (DeepSeek-V3)
``"halves to interleaved"``    the backward of that
=============================  =========================================================================

=============================  =========================================================================
table                          cosine (and sine) of the first and the second member of pair j
=============================  =========================================================================
``"halves"``                   cos[j] and cos[j + rotary_dim / 2]
``"interleaved"``              cos[2 j] and cos[2 j + 1]
``"shared"``                   cos[j] for both: tables of rotary_dim / 2
``"complex"``                  `cos` holds the complex numbers cosine + i sine, 2 j and 2 j + 1; `sin` is not read
``"planes"``                   as "halves", from one of several tables: (plane, batch, seq, rotary_dim)
=============================  =========================================================================

Shapes: tiles of tokens by heads by columns; a head has head_dim columns, of which rotary_dim turn, from column first
on. The others are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from liger_trainer.kernels.runtime import cdiv, has_elements, next_power_of_2, on_device, tl, triton


@triton.jit
def load_pairs(row_ptr, mask, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """First and second members of the pairs in fp32, (tokens, heads, BLOCK_HALF); `row_ptr` is (tokens, heads, 1)."""
    if INTERLEAVED:  # one wide load instead of two with stride 2
        column = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        both = tl.load(row_ptr + column, mask=mask & (column < 2 * HALF), other=0.0)
        both = tl.reshape(both, (both.shape[0], both.shape[1], BLOCK_HALF, 2))
        first, second = tl.split(both)
    else:
        column = tl.arange(0, BLOCK_HALF)[None, None, :]
        first = tl.load(row_ptr + column, mask=mask & (column < HALF), other=0.0)
        second = tl.load(row_ptr + HALF + column, mask=mask & (column < HALF), other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(row_ptr, first, second, mask, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rounds the pairs to the dtype of `row_ptr` and stores them; the inverse of `load_pairs`."""
    dtype = row_ptr.dtype.element_ty
    first, second = first.to(dtype), second.to(dtype)
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK_HALF)[None, None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], first.shape[1], 2 * BLOCK_HALF))
        tl.store(row_ptr + column, both, mask=mask & (column < 2 * HALF))
    else:
        column = tl.arange(0, BLOCK_HALF)[None, None, :]
        tl.store(row_ptr + column, first, mask=mask & (column < HALF))
        tl.store(row_ptr + HALF + column, second, mask=mask & (column < HALF))


@triton.jit
def load_table(
    table_ptr,
    row,  # (tokens, 1, 1) offsets
    plane_stride,
    mask,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TABLE: tl.constexpr,
    PLANE_ENDS: tl.constexpr,
):
    """The table's entries for both members of every pair; of a complex table, the cosines and the sines."""
    if TABLE == "shared":
        pair = tl.arange(0, BLOCK_HALF)[None, None, :]
        first = tl.load(table_ptr + row + pair, mask=mask & (pair < HALF), other=0.0).to(tl.float32)
        second = first
    elif TABLE == "planes":
        pair = tl.arange(0, BLOCK_HALF)[None, None, :]
        plane = tl.zeros_like(pair)
        for index in tl.static_range(len(PLANE_ENDS)):
            plane += (pair >= PLANE_ENDS[index]).to(tl.int32)
        row += plane.to(tl.int64) * plane_stride
        first = tl.load(table_ptr + row + pair, mask=mask & (pair < HALF), other=0.0).to(tl.float32)
        second = tl.load(table_ptr + row + HALF + pair, mask=mask & (pair < HALF), other=0.0).to(tl.float32)
    else:
        first, second = load_pairs(table_ptr + row, mask, HALF, BLOCK_HALF, TABLE != "halves")
    return first, second


@triton.jit
def load_rotation(
    cos_ptr,
    sin_ptr,
    cos_row,
    sin_row,
    cos_stride_plane,
    sin_stride_plane,
    mask,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    TABLE: tl.constexpr,
    PLANE_ENDS: tl.constexpr,
    TRANSPOSED: tl.constexpr,  # the transposed rotation, as the backward needs it
):
    """Cosines for the first and second members of the pairs, then their sines."""
    cos1, cos2 = load_table(cos_ptr, cos_row, cos_stride_plane, mask, HALF, BLOCK_HALF, TABLE, PLANE_ENDS)
    if TABLE == "complex":
        sin1, sin2 = cos2, cos2
        cos2 = cos1
    else:
        sin1, sin2 = load_table(sin_ptr, sin_row, sin_stride_plane, mask, HALF, BLOCK_HALF, TABLE, PLANE_ENDS)
    if TRANSPOSED:
        sin1, sin2 = -sin2, -sin1
    return cos1, cos2, sin1, sin2


@triton.jit
def _copy_columns(x_row, y_row, columns, mask):
    tl.store(y_row + columns, tl.load(x_row + columns, mask=mask).to(y_row.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["seq_len"])
def rope_kernel(
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,  # outputs are contiguous (batch, seq, heads, head_dim)
    k_out_ptr,
    seq_len,
    q_stride_batch,
    q_stride_seq,
    q_stride_head,
    k_stride_batch,
    k_stride_seq,
    k_stride_head,
    cos_stride_plane,
    cos_stride_batch,  # 0 where the table is shared by the batch
    cos_stride_seq,
    sin_stride_plane,
    sin_stride_batch,
    sin_stride_seq,
    NUM_Q_HEADS: tl.constexpr,
    NUM_K_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    FIRST: tl.constexpr,
    HALF: tl.constexpr,
    FROM_INTERLEAVED: tl.constexpr,
    TO_INTERLEAVED: tl.constexpr,
    TABLE: tl.constexpr,
    PLANE_ENDS: tl.constexpr,  # pair at which each plane but the first begins
    TRANSPOSED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_Q_HEADS: tl.constexpr,
    BLOCK_K_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_FRONT: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
):
    """One program rotates BLOCK_TOKENS tokens of one sequence: a block of query heads and a block of key heads."""
    blocks_per_sequence = tl.cdiv(seq_len, BLOCK_TOKENS)
    batch = (tl.program_id(0) // blocks_per_sequence).to(tl.int64)
    first_token = (tl.program_id(0) % blocks_per_sequence) * BLOCK_TOKENS
    # Tiles are (tokens, heads, columns).
    token = (first_token + tl.arange(0, BLOCK_TOKENS).to(tl.int64))[:, None, None]
    q_head = (tl.program_id(1) * BLOCK_Q_HEADS + tl.arange(0, BLOCK_Q_HEADS).to(tl.int64))[None, :, None]
    k_head = (tl.program_id(1) * BLOCK_K_HEADS + tl.arange(0, BLOCK_K_HEADS).to(tl.int64))[None, :, None]
    in_sequence = token < seq_len

    # Everything is loaded before anything is stored: the compiler cannot move a load above a store it might alias.
    cos1, cos2, sin1, sin2 = load_rotation(
        cos_ptr,
        sin_ptr,
        batch * cos_stride_batch + token * cos_stride_seq,
        batch * sin_stride_batch + token * sin_stride_seq,
        cos_stride_plane,
        sin_stride_plane,
        in_sequence,
        HALF,
        BLOCK_HALF,
        TABLE,
        PLANE_ENDS,
        TRANSPOSED,
    )
    q_row = q_ptr + batch * q_stride_batch + token * q_stride_seq + q_head * q_stride_head
    k_row = k_ptr + batch * k_stride_batch + token * k_stride_seq + k_head * k_stride_head
    q_out_row = q_out_ptr + ((batch * seq_len + token) * NUM_Q_HEADS + q_head) * HEAD_DIM
    k_out_row = k_out_ptr + ((batch * seq_len + token) * NUM_K_HEADS + k_head) * HEAD_DIM
    q_mask = in_sequence & (q_head < NUM_Q_HEADS)
    k_mask = in_sequence & (k_head < NUM_K_HEADS)
    if NUM_Q_HEADS > 0:
        q1, q2 = load_pairs(q_row + FIRST, q_mask, HALF, BLOCK_HALF, FROM_INTERLEAVED)
    if NUM_K_HEADS > 0:
        k1, k2 = load_pairs(k_row + FIRST, k_mask, HALF, BLOCK_HALF, FROM_INTERLEAVED)
    if NUM_Q_HEADS > 0:
        first, second = q1 * cos1 - q2 * sin1, q2 * cos2 + q1 * sin2
        store_pairs(q_out_row + FIRST, first, second, q_mask, HALF, BLOCK_HALF, TO_INTERLEAVED)
    if NUM_K_HEADS > 0:
        first, second = k1 * cos1 - k2 * sin1, k2 * cos2 + k1 * sin2
        store_pairs(k_out_row + FIRST, first, second, k_mask, HALF, BLOCK_HALF, TO_INTERLEAVED)

    if FIRST > 0:  # the columns before the rotary part are copied
        front = tl.arange(0, BLOCK_FRONT)[None, None, :]
        if NUM_Q_HEADS > 0:
            _copy_columns(q_row, q_out_row, front, q_mask & (front < FIRST))
        if NUM_K_HEADS > 0:
            _copy_columns(k_row, k_out_row, front, k_mask & (front < FIRST))
    if FIRST + 2 * HALF < HEAD_DIM:  # and those behind it
        tail = FIRST + 2 * HALF + tl.arange(0, BLOCK_TAIL)[None, None, :]
        if NUM_Q_HEADS > 0:
            _copy_columns(q_row, q_out_row, tail, q_mask & (tail < HEAD_DIM))
        if NUM_K_HEADS > 0:
            _copy_columns(k_row, k_out_row, tail, k_mask & (tail < HEAD_DIM))


def launch_config(num_heads: int, block_half: int) -> tuple[int, int, int]:
    """(tokens per program, programs per token, warps), from the elements in half a token.

    One program takes a whole token of 2,048 to 8,192 elements per half, which keeps enough loads in flight; several
    tokens where there are few heads; and a share of the heads where a whole token would spill registers.
    """
    elements = next_power_of_2(num_heads) * block_half
    tokens = max(1, min(16, 2048 // elements))
    splits = max(1, elements // 8192)
    return tokens, splits, 4 if tokens * elements // splits <= 4096 else 8


def contiguous_columns(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy of it where its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def rotary_width(table_width: int, table: str) -> int:
    """Number of dimensions of a head that a table of this width rotates."""
    return 2 * table_width if table == "shared" else table_width


def table_strides(table: torch.Tensor) -> tuple[int, int, int]:
    """Strides of plane (0 without planes), batch (0 if the batch shares the table) and position."""
    plane = table.stride(0) if table.dim() == 4 else 0
    return plane, table.stride(-3) if table.shape[-3] > 1 else 0, table.stride(-2)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    transposed: bool,
    pairs: str = "halves",
    table: str = "halves",
    sections: Sequence[int] = (),
    first: int = 0,
) -> None:
    """Rotates q and k of shape (batch, seq, heads, head_dim) from column `first` on; either may have no heads.

    The memory of `q_out` and `k_out` is written as contiguous (batch, seq, heads, head_dim), whatever their strides.
    """
    batch, seq_len, num_q_heads, head_dim = q.shape
    num_k_heads, half = k.shape[2], rotary_width(cos.shape[-1], table) // 2
    if not (has_elements(q) or has_elements(k)):
        return
    q, k, cos, sin = (contiguous_columns(x) for x in (q, k, cos, sin))
    block_half = next_power_of_2(max(half, 1))
    block_front = next_power_of_2(max(first, 1))
    block_tokens, splits, num_warps = launch_config(max(num_q_heads, num_k_heads), max(block_half, block_front // 4))
    grid = (batch * cdiv(seq_len, block_tokens), splits)
    with on_device(q):
        rope_kernel[grid](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            seq_len,
            *q.stride()[:3],
            *k.stride()[:3],
            *table_strides(cos),
            *table_strides(sin),
            NUM_Q_HEADS=num_q_heads,
            NUM_K_HEADS=num_k_heads,
            HEAD_DIM=head_dim,
            FIRST=first,
            HALF=half,
            FROM_INTERLEAVED=pairs.startswith("interleaved"),
            TO_INTERLEAVED=pairs.endswith("interleaved"),
            TABLE=table,
            PLANE_ENDS=tuple(sum(sections[: index + 1]) for index in range(len(sections) - 1)),
            TRANSPOSED=transposed,
            BLOCK_TOKENS=block_tokens,
            BLOCK_Q_HEADS=next_power_of_2(cdiv(max(num_q_heads, 1), splits)),
            BLOCK_K_HEADS=next_power_of_2(cdiv(max(num_k_heads, 1), splits)),
            BLOCK_HALF=block_half,
            BLOCK_FRONT=block_front,
            BLOCK_TAIL=next_power_of_2(max(head_dim - first - 2 * half, 1)),
            num_warps=num_warps,
        )
