"""The keys that an indexer selects (DeepSeek V3.2, GLM-5), as the bits of a plan.

The score of a key t for a query s, over the heads h of the indexer:

    score[s, t] = sum over h of weight[s, h] · max(0, scale · q[s, h] · k[t])

A query selects the `count` keys with the largest scores of those that it sees, or all of them if it sees no more.

Two kernels run for each block of queries: the first gives their scores in fp32, where any of them is needed; in the
second a program finds the least score that is selected, one binary digit after the other, and sets the bits of its
query's keys. All blocks share the memory of the scores.

Shapes: batch rows of length tokens, H heads of D numbers; words of 32 keys of a document.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.attention.plan import BLOCK, AttentionPlan, bits_of, dense, places_of
from liger_trainer.kernels.rows import device_limits
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, on_device, tl, triton, use_triton

_QUERIES, _KEYS, _FEWER_KEYS = 64, 128, 32  # of a tile of scores; the last is for cards before Ampere
_CHUNK = 4096  # keys of a query that a program looks at at once


@torch.no_grad()
def select(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float, count: int
) -> torch.Tensor:
    """The keys with the largest scores, of those that each query sees.

    Args:
        plan: Which keys each query sees. With a window, the reference runs.
        q: (batch, length, H, D), any strides. It is rounded to the dtype of `k`.
        k: (batch, length, D), any strides.
        weights: float32 (batch, length, H).
        scale: A number by which products of queries and keys are multiplied.
        count: How many keys are selected for a query that sees more.

    Returns:
        int32 (words, batch * length), the `bits` of a plan. Of keys with equal scores the kernel selects the first
        ones, the reference those of torch.topk. NaN counts as the largest score.
    """
    if plan.window or q.shape[-1] > 256 or not (use_triton(q) and use_triton(k)):
        return select_reference(plan, q, k, weights, scale, count)
    (batch, length, width), heads = k.shape, q.shape[2]
    places = places_of(plan, batch, length, 0, length, k.device)
    base, position = (each.to(torch.int32).contiguous() for each in places)
    words = cdiv(plan.longest_keys(length), 32)
    scores = torch.empty(batch, min(BLOCK, length), length, dtype=torch.float32, device=k.device)
    bits = torch.empty(words, batch, length, dtype=torch.int32, device=k.device)
    copies = None if plan.keys is None or plan.keys.copies is None else plan.keys.copies.index.to(k.device)
    keys = _FEWER_KEYS if device_limits(k.device).before_ampere else _KEYS
    with on_device(k):
        for start in range(0, length, BLOCK):
            queries = min(BLOCK, length - start)
            _scores_kernel[(cdiv(length, keys), cdiv(queries, _QUERIES), batch)](
                *(q, q.stride(0), q.stride(1), q.stride(2), q.stride(3)),
                *(k, k.stride(0), k.stride(1), k.stride(2)),
                *(weights, weights.stride(0), weights.stride(1), weights.stride(2)),
                *(base, position, scores, scores.stride(0), scale, start, queries, length, count),
                HEADS=heads,
                WIDTH=width,
                BLOCK_WIDTH=max(16, next_power_of_2(width)),
                COPIED=copies is not None,
                PRECISE=k.dtype == torch.float32,
                BLOCK_QUERIES=_QUERIES,
                BLOCK_KEYS=keys,
                num_warps=4 if width <= 128 else 8,
                num_stages=2,
            )
            _bits_kernel[(queries, batch)](
                *(scores, scores.stride(0), base, position, base if copies is None else copies, bits),
                *(start, length, count, words),
                COPIED=copies is not None,
                CHUNK=min(_CHUNK, next_power_of_2(32 * words)),
                num_warps=4,
            )
    return bits.flatten(1)


@torch.no_grad()
def select_reference(
    plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor, scale: float, count: int
) -> torch.Tensor:
    """`select` in plain torch, as transformers computes it, for a block of queries at a time."""
    batch, length = k.shape[:2]
    keys, found = k.mT.float().unsqueeze(1), []
    for start in range(0, length, BLOCK):
        rows = slice(start, start + BLOCK)
        scores = torch.relu(torch.matmul(q[:, rows].float(), keys) * scale)
        scores = torch.matmul(weights[:, rows].unsqueeze(-2), scores).squeeze(-2)
        seen = dense(plan, batch, length, k.device, rows=rows)[:, 0]
        indices = scores.masked_fill(~seen, float("-inf")).topk(min(count, length)).indices
        found.append(bits_of(plan, indices, length, start))
    return torch.cat(found, 2).flatten(1)


@triton.jit
def _scores_kernel(
    q_ptr,
    q_stride_row,
    q_stride_token,
    q_stride_head,
    q_stride_column,
    k_ptr,
    k_stride_row,
    k_stride_token,
    k_stride_column,
    weights_ptr,
    weights_stride_row,
    weights_stride_token,
    weights_stride_head,
    base_ptr,
    position_ptr,
    scores_ptr,
    scores_stride_row,
    scale,
    start,
    queries,
    length,
    count,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    COPIED: tl.constexpr,
    PRECISE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """A tile of scores, (BLOCK_QUERIES, BLOCK_KEYS), unless none of its queries needs any of them."""
    PRECISION: tl.constexpr = "ieee" if PRECISE else None
    row = tl.program_id(2).to(tl.int64)
    query = tl.program_id(1) * BLOCK_QUERIES + tl.arange(0, BLOCK_QUERIES)
    first_key = tl.program_id(0) * BLOCK_KEYS
    key = first_key + tl.arange(0, BLOCK_KEYS)
    column = tl.arange(0, BLOCK_WIDTH)
    exists, is_key, is_column = query < queries, key < length, column < WIDTH
    token = start + query
    position = tl.load(position_ptr + row * length + token, exists, -1)
    needed = tl.max(position, 0) >= count
    if not COPIED:
        base = tl.load(base_ptr + row * length + token, exists, length)
        needed &= (first_key + BLOCK_KEYS > tl.min(base, 0)) & (first_key <= tl.max(base + position, 0))
    if needed:
        k = tl.load(
            k_ptr + row * k_stride_row + key[None, :] * k_stride_token + column[:, None] * k_stride_column,
            is_key[None, :] & is_column[:, None],
            0.0,
        )
        q_ptrs = q_ptr + row * q_stride_row + token[:, None] * q_stride_token + column[None, :] * q_stride_column
        weights_ptrs = weights_ptr + row * weights_stride_row + token * weights_stride_token
        total = tl.zeros((BLOCK_QUERIES, BLOCK_KEYS), tl.float32)
        for head in range(HEADS):
            q = tl.load(q_ptrs + head * q_stride_head, exists[:, None] & is_column[None, :], 0.0)
            weight = tl.load(weights_ptrs + head * weights_stride_head, exists, 0.0)
            products = tl.dot(q.to(k.dtype), k, input_precision=PRECISION)
            products *= scale
            total += weight[:, None] * tl.where(products < 0.0, 0.0, products)  # NaN stays
        places = row * scores_stride_row + query[:, None].to(tl.int64) * length + key[None, :]
        tl.store(scores_ptr + places, total, exists[:, None] & is_key[None, :])


@triton.jit
def _ordered(scores):
    """uint32 numbers in the order of the scores, none of which is -0: they are sums from 0 on. NaN is the largest."""
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, ~bits, bits ^ -2147483648)
    return tl.where(scores != scores, -1, ordered).to(tl.uint32, bitcast=True)


@triton.jit
def _scores_of(scores_ptr, copies_ptr, base, position, place, COPIED: tl.constexpr):
    """The scores of places in a document, ordered; 0 past the query's own position."""
    key = base + place
    if COPIED:
        key = tl.load(copies_ptr + key, place <= position, 0)
    return tl.where(place <= position, _ordered(tl.load(scores_ptr + key, place <= position, 0.0)), 0)


@triton.jit
def _bits_kernel(
    scores_ptr,
    scores_stride_row,
    base_ptr,
    position_ptr,
    copies_ptr,
    bits_ptr,
    start,
    length,
    count,
    words,
    COPIED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The words of one query: first the least score that is selected, then the bits."""
    query, row, batch = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    scores_ptr += row * scores_stride_row + query * length
    token = row * length + start + query  # of all rows
    base, position = tl.load(base_ptr + token), tl.load(position_ptr + token)
    digits = tl.where(position >= count, 32, 0)
    least = tl.full((), 0, tl.uint32)
    for digit in range(digits):
        trial = least | (tl.full((), 1, tl.uint32) << tl.cast(31 - digit, tl.uint32))
        reached = tl.full((), 0, tl.int32)
        for begin in range(0, position + 1, CHUNK):
            place = begin + tl.arange(0, CHUNK)
            reached += tl.sum((_scores_of(scores_ptr, copies_ptr, base, position, place, COPIED) >= trial).to(tl.int32))
        least = tl.where(reached >= count, trial, least)
    above = tl.full((), 0, tl.int32)
    for begin in range(0, tl.where(digits > 0, position + 1, 0), CHUNK):
        place = begin + tl.arange(0, CHUNK)
        above += tl.sum((_scores_of(scores_ptr, copies_ptr, base, position, place, COPIED) > least).to(tl.int32))
    equals = tl.full((), 0, tl.int32)
    for begin in range(0, 32 * words, CHUNK):
        place = begin + tl.arange(0, CHUNK)
        chosen = place <= position
        if digits > 0:
            ordered = _scores_of(scores_ptr, copies_ptr, base, position, place, COPIED)
            equal = ((ordered == least) & chosen).to(tl.int32)
            among_first = equals + tl.cumsum(equal, 0) <= count - above
            equals += tl.sum(equal)
            chosen &= (ordered > least) | ((equal > 0) & among_first)
        digit_of = tl.arange(0, 32)[None, :]
        packed = tl.sum(tl.reshape(chosen.to(tl.int32), (CHUNK // 32, 32)) << digit_of, 1)
        word = begin // 32 + tl.arange(0, CHUNK // 32)
        tl.store(bits_ptr + word.to(tl.int64) * batch * length + token, packed, word < words)
