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
def channel_gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    totals_ptr,
    beta_ptr,
    do_ptr,
    states_ptr,
    dstates_ptr,
    u_ptr,
    y_ptr,
    chunks_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    scale,
    part_stride,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
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
    """One chunk, value head and block of channels of the keys."""
    PARTS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    part = tl.program_id(0) % PARTS
    row = part * BLOCK_K
    head = (tl.program_id(0) // PARTS % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // PARTS // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    of_chunk = chunk * HEADS + head
    q_ptr += first * q_token + head // SHARE * q_head
    k_ptr += first * k_token + head // SHARE * k_head
    v_ptr += first * v_token + head * v_head
    do_ptr += first * do_token + head * do_head
    states_ptr += of_chunk * (K * V)
    dstates_ptr += of_chunk * (K * V)
    u_ptr += of_chunk * (_N * V)
    y_ptr += of_chunk * (_N * V)
    out = (first * HEADS + head) * K
    totals_ptr += out
    # Not in fp16, where dP may overflow.
    LEVEL_DTYPE: tl.constexpr = tl.bfloat16 if k_ptr.dtype.element_ty == tl.bfloat16 else tl.float32
    place = tl.arange(0, _N)
    beta = load_values(beta_ptr + first * beta_token + head * beta_head, 0, beta_token, tokens)

    # Both ways, as Triton before 3.7.1 transposes results of the tensor cores wrongly on Hopper.
    dp = tl.zeros((_N, _N), tl.float32)
    dp_transposed = tl.zeros((_N, _N), tl.float32)
    yu = tl.zeros((_N, _N), tl.float32)
    yu_transposed = tl.zeros((_N, _N), tl.float32)
    dbeta = tl.zeros((_N,), tl.float32)
    for column in range(0, V, BLOCK_V):
        do = load_tile(do_ptr, 0, do_token, tokens, column, V, BLOCK_V)
        u = load_tile(u_ptr, 0, V, _N, column, V, BLOCK_V)
        y = load_tile(y_ptr, 0, V, _N, column, V, BLOCK_V)
        if part == 0:
            wide = y.to(tl.float32)
            v = load_tile(v_ptr, 0, v_token, tokens, column, V, BLOCK_V).to(tl.float32)
            dbeta += tl.sum(wide * v, 1)
            dv = beta[:, None] * wide
            store_tile(dv_ptr + (first * HEADS + head) * V, dv, 0, HEADS * V, tokens, column, V, BLOCK_V)
        dp = tl.dot(do, u.T, dp, input_precision=PRECISION)
        dp_transposed = tl.dot(u, do.T, dp_transposed, input_precision=PRECISION)
        yu = tl.dot(y, u.T, yu, input_precision=PRECISION)
        yu_transposed = tl.dot(u, y.T, yu_transposed, input_precision=PRECISION)
    dp *= scale
    dp_transposed *= scale
    own = tl.sum(tl.where(place[:, None] == place[None, :], dp, 0.0), 1)[:, None]
    dp, dp_transposed = dp.to(LEVEL_DTYPE), dp_transposed.to(LEVEL_DTYPE)
    yu, yu_transposed = yu.to(LEVEL_DTYPE), yu_transposed.to(LEVEL_DTYPE)

    q = load_tile(q_ptr, 0, q_token, tokens, row, K, BLOCK_K).to(tl.float32)
    k = load_tile(k_ptr, 0, k_token, tokens, row, K, BLOCK_K).to(tl.float32)
    total = load_totals(totals_ptr, HEADS * K, tl.minimum(place, tokens - 1), row, K, BLOCK_K)
    columns = row + tl.arange(0, BLOCK_K)
    last = tl.load(totals_ptr + (tokens - 1) * (HEADS * K) + columns, mask=columns < K, other=0.0)
    dq = tl.zeros((_N, BLOCK_K), tl.float32)
    to_row = tl.zeros((_N, BLOCK_K), tl.float32)  # -krow without beta
    to_column = tl.zeros((_N, BLOCK_K), tl.float32)  # kcol
    dlast = tl.zeros((BLOCK_K,), tl.float32)
    for column in range(0, V, BLOCK_V):
        do = load_tile(do_ptr, 0, do_token, tokens, column, V, BLOCK_V)
        u = load_tile(u_ptr, 0, V, _N, column, V, BLOCK_V)
        y = load_tile(y_ptr, 0, V, _N, column, V, BLOCK_V)
        state = _state_block(states_ptr, row, column, K, V, BLOCK_K, BLOCK_V)
        dstate = _state_block(dstates_ptr, row, column, K, V, BLOCK_K, BLOCK_V)
        dq = tl.dot(do, state.T, dq, input_precision=PRECISION)
        to_row = tl.dot(y, state.T, to_row, input_precision=PRECISION)
        to_column = tl.dot(u, dstate.T, to_column, input_precision=PRECISION)
        dlast += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
    from_start = tl.exp(total)
    dq *= from_start * scale
    to_row *= from_start
    to_column *= tl.exp(last[None, :] - total)
    dlast = dlast * tl.exp(last) + tl.sum(k * to_column, 0)
    dtotal = q * dq - k * (beta[:, None] * to_row + to_column)  # dG
    dtotal += tl.where((place == _N - 1)[:, None], dlast[None, :], 0.0)
    for level in range(LEVELS):
        decay = level_decays(totals_ptr, HEADS * K, tokens, total, 1 << level, row, K, BLOCK_K)
        below, above = level_pairs(1 << level, True), level_pairs(1 << level, False)
        asked, known = (q * decay).to(LEVEL_DTYPE), (k * decay).to(LEVEL_DTYPE)
        weighted = (k * decay * beta[:, None]).to(LEVEL_DTYPE)
        of_queries = tl.dot(tl.where(below, dp, 0.0), known, input_precision=LEVEL_PRECISION)
        of_rows = tl.dot(tl.where(below, yu, 0.0), known, input_precision=LEVEL_PRECISION)
        of_columns = tl.dot(tl.where(above, dp_transposed, 0.0), asked, input_precision=LEVEL_PRECISION)
        of_columns -= tl.dot(tl.where(above, yu_transposed, 0.0), weighted, input_precision=LEVEL_PRECISION)
        dq += decay * of_queries
        to_row += decay * of_rows
        to_column += decay * of_columns
        dtotal += asked.to(tl.float32) * of_queries
        dtotal -= weighted.to(tl.float32) * of_rows + known.to(tl.float32) * of_columns
    dbeta -= tl.sum(k * to_row, 1)
    to_row *= -beta[:, None]
    if dg_ptr is not None:
        dg = tl.cumsum(dtotal, 0, reverse=True)
        store_tile(dg_ptr + out, dg, 0, HEADS * K, tokens, row, K, BLOCK_K)
    store_tile(dq_ptr + out, dq + own * k, 0, HEADS * K, tokens, row, K, BLOCK_K)
    store_tile(dk_ptr + out, to_row + to_column + own * q, 0, HEADS * K, tokens, row, K, BLOCK_K)

    if dbeta_ptr is not None:
        out_beta = dbeta_ptr + part * part_stride + (first + place) * HEADS + head
        tl.store(out_beta, dbeta, mask=place < tokens)
