"""The gradients of all chunks at once where every channel of the keys has a decay of its own (KDA).

With dO already times scale, S the state before a chunk, dS the gradient of the one behind it, and U and Y of scans::

    dv = beta Y             dP = tril(dO U^T)               dM = -strict_tril(diag(beta) Y U^T)
    dq_ic   = exp(G_ic) (dO S^T)_ic + sum_j dP_ij k_jc exp(G_ic - G_jc)
    krow_ic = -beta_i exp(G_ic) (Y S^T)_ic + sum_j dM_ij k_jc exp(G_ic - G_jc)
    kcol_jc = exp(G_Nc - G_jc) (U dS^T)_jc + sum_i (dP_ij q_ic + dM_ij k_ic) exp(G_ic - G_jc)
    dk = krow + kcol        dbeta_i = Y_i . v_i + k_i . krow_i / beta_i
    dG = q dq + k (krow - kcol);  for the last token + sum over the columns of S' * dS,  S' the state behind the chunk
    dg = reverse cumulative sum of dG

krow is computed without beta first, so nothing is divided by it. Sums with exp(G_i - G_j) are those of the levels of
`channel_factors.py`. The part of i = j is left out of dG, where its two terms are the same. Each other pair of tokens
is in dG twice, with opposite signs, and both are the product of the same rounded numbers: the sum of dG takes most of
them away again, and what rounding left of them would be in dg.

Two kernels, whose programs keep little: the first has what is 64 by 64, dP and Y U^T without beta, and the second some
channels of the keys. On a level, a token in a second half gets terms of dq and krow from tokens of the first half, and
one in a first half gets terms of kcol from tokens of the second. So both matrices are written with both orders of each
pair, and one product a matrix has all terms of a level.

Shapes: chunks of 64 tokens; S and dS (K, V), in blocks of BLOCK_K rows and BLOCK_V columns.
"""

from __future__ import annotations

from liger_trainer.kernels.documents import CHUNK
from liger_trainer.kernels.recurrence.channel_factors import (
    LEVELS,
    level_decays,
    level_pairs,
    load_totals,
)
from liger_trainer.kernels.recurrence.chunk_scan import load_tile, load_values, store_tile
from liger_trainer.kernels.runtime import tl, triton

_N = tl.constexpr(CHUNK)


@triton.jit
def _state_block(base, row, column, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """(BLOCK_K, BLOCK_V) of a state."""
    rows, columns = row + tl.arange(0, BLOCK_K), column + tl.arange(0, BLOCK_V)
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    return tl.load(base + rows[:, None] * V + columns[None, :], mask=mask, other=0.0)


@triton.jit
def channel_pairs_kernel(
    v_ptr,
    beta_ptr,
    do_ptr,
    u_ptr,
    y_ptr,
    chunks_ptr,
    dv_ptr,
    dp_ptr,
    yu_ptr,
    dbeta_ptr,
    scale,
    v_token,
    v_head,
    beta_token,
    beta_head,
    do_token,
    do_head,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of one chunk and value head: dv, Y . v, and dP and Y U^T of the later and the earlier token, in both orders."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    of_chunk = chunk * HEADS + head
    place = tl.arange(0, _N)
    beta = load_values(beta_ptr + first * beta_token + head * beta_head, 0, beta_token, tokens)
    dp = tl.zeros((_N, _N), tl.float32)
    yu = tl.zeros((_N, _N), tl.float32)
    dbeta = tl.zeros((_N,), tl.float32)
    for column in range(0, V, BLOCK_V):
        do = load_tile(do_ptr + first * do_token + head * do_head, 0, do_token, tokens, column, V, BLOCK_V)
        u = load_tile(u_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
        y = load_tile(y_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
        dp = tl.dot(do, u.T, dp, input_precision=PRECISION)
        yu = tl.dot(y, u.T, yu, input_precision=PRECISION)
        wide = y.to(tl.float32)
        dv = beta[:, None] * wide
        store_tile(dv_ptr + (first * HEADS + head) * V, dv, 0, HEADS * V, tokens, column, V, BLOCK_V)
        v = load_tile(v_ptr + first * v_token + head * v_head, 0, v_token, tokens, column, V, BLOCK_V)
        dbeta += tl.sum(wide * v, 1)
    dp *= scale
    row_later = place[:, None] >= place[None, :]
    out = of_chunk * (_N * _N) + place[:, None] * _N + place[None, :]
    tl.store(dp_ptr + out, tl.where(row_later, dp, dp.T).to(dp_ptr.dtype.element_ty))
    tl.store(yu_ptr + out, tl.where(row_later, yu, yu.T).to(yu_ptr.dtype.element_ty))
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + (first + place) * HEADS + head, dbeta, mask=place < tokens)


@triton.jit
def channel_gradients_kernel(
    q_ptr,
    k_ptr,
    totals_ptr,
    beta_ptr,
    do_ptr,
    states_ptr,
    dstates_ptr,
    u_ptr,
    y_ptr,
    dp_ptr,
    yu_ptr,
    chunks_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    scale,
    part_stride,
    q_token,
    q_head,
    k_token,
    k_head,
    beta_token,
    beta_head,
    do_token,
    do_head,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    LEVEL_PRECISION: tl.constexpr,
):
    """Of one chunk, value head and block of channels of the keys: dq, dk, dg, and the other terms of dbeta."""
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    part = tl.program_id(0) % PARTS
    row = part * BLOCK_K
    head = (tl.program_id(0) // PARTS % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // PARTS // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    of_chunk = chunk * HEADS + head
    do_ptr += first * do_token + head * do_head
    out = (first * HEADS + head) * K
    totals_ptr += out
    place = tl.arange(0, _N)

    dq = tl.zeros((_N, BLOCK_K), tl.float32)
    to_row = tl.zeros((_N, BLOCK_K), tl.float32)  # -krow without beta
    to_column = tl.zeros((_N, BLOCK_K), tl.float32)  # kcol
    dlast = tl.zeros((BLOCK_K,), tl.float32)
    for column in range(0, V, BLOCK_V):
        state = _state_block(states_ptr + of_chunk * (K * V), row, column, K, V, BLOCK_K, BLOCK_V)
        do = load_tile(do_ptr, 0, do_token, tokens, column, V, BLOCK_V)
        dq = tl.dot(do, state.T, dq, input_precision=PRECISION)
        y = load_tile(y_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
        to_row = tl.dot(y, state.T, to_row, input_precision=PRECISION)
        dstate = _state_block(dstates_ptr + of_chunk * (K * V), row, column, K, V, BLOCK_K, BLOCK_V)
        u = load_tile(u_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
        to_column = tl.dot(u, dstate.T, to_column, input_precision=PRECISION)
        dlast += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)

    q = load_tile(q_ptr + first * q_token + head // SHARE * q_head, 0, q_token, tokens, row, K, BLOCK_K)
    k = load_tile(k_ptr + first * k_token + head // SHARE * k_head, 0, k_token, tokens, row, K, BLOCK_K)
    beta = load_values(beta_ptr + first * beta_token + head * beta_head, 0, beta_token, tokens)[:, None]
    total = load_totals(totals_ptr, HEADS * K, tl.minimum(place, tokens - 1), row, K, BLOCK_K)
    columns = row + tl.arange(0, BLOCK_K)
    last = tl.load(totals_ptr + (tokens - 1) * (HEADS * K) + columns, mask=columns < K, other=0.0)
    from_start = tl.exp2(total)
    dq *= from_start * scale
    to_row *= from_start
    to_column *= tl.exp2(last[None, :] - total)
    dlast = dlast * tl.exp2(last) + tl.sum(k * to_column, 0)
    dtotal = q * dq - k * (beta * to_row + to_column)  # dG
    dtotal += tl.where((place == _N - 1)[:, None], dlast[None, :], 0.0)

    square = of_chunk * (_N * _N) + place[:, None] * _N + place[None, :]
    dp = tl.load(dp_ptr + square)
    yu = tl.load(yu_ptr + square)
    for level in range(LEVELS):
        half = 1 << level
        pairs = level_pairs(half, True)
        second = ((place & half) != 0)[:, None]
        decay = level_decays(totals_ptr, HEADS * K, tokens, total, half, row, K, BLOCK_K)
        # Tokens of second halves get terms of dq and krow from those of first ones, which get terms of kcol from them.
        asked = (tl.where(second, q, k) * decay).to(dp.dtype)
        weighted = (k * decay * tl.where(second, beta, 1.0)).to(dp.dtype)
        of_p = tl.dot(tl.where(pairs, dp, 0.0), asked, input_precision=LEVEL_PRECISION)
        of_m = tl.dot(tl.where(pairs, yu, 0.0), weighted, input_precision=LEVEL_PRECISION)
        terms = asked.to(tl.float32) * of_p - weighted.to(tl.float32) * of_m
        dtotal += tl.where(second, 1.0, -1.0) * terms
        of_row = tl.where(second, 1.0, 0.0) * decay
        dq += of_row * of_p
        to_row += of_row * of_m
        to_column += (decay - of_row) * (of_p - of_m)
    if dbeta_ptr is not None:
        tl.store(
            dbeta_ptr + part * part_stride + (first + place) * HEADS + head, -tl.sum(k * to_row, 1), mask=place < tokens
        )
    if dg_ptr is not None:
        store_tile(dg_ptr + out, tl.cumsum(dtotal, 0, reverse=True), 0, HEADS * K, tokens, row, K, BLOCK_K)
    own = tl.load(dp_ptr + of_chunk * (_N * _N) + place * (_N + 1)).to(tl.float32)[:, None]
    store_tile(dq_ptr + out, dq + own * k, 0, HEADS * K, tokens, row, K, BLOCK_K)
    store_tile(dk_ptr + out, to_column - beta * to_row + own * q, 0, HEADS * K, tokens, row, K, BLOCK_K)
