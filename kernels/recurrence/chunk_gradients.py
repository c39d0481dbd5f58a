"""The gradients of all chunks at once, out of the states that the two scans wrote.

With dO already times scale, S the state before a chunk, dS the gradient of the one behind it, and Y of the reverse scan
(dU without the delta rule), for each value head::

    dv = beta Y + skip dO                   dP = tril(dO U^T)               dM = -delta strict_tril(diag(beta) Y U^T)
    dq_i   = exp(G_i) (dO S^T)_i + sum_j dP_ij exp(G_i - G_j) k_j
    dk_j   = exp(G_N - G_j) (U dS^T)_j - delta beta_j exp(G_j) (Y S^T)_j
             + sum_i dP_ij exp(G_i - G_j) q_i + sum_i (dM_ij + dM_ji) exp(-|G_i - G_j|) k_i
    dbeta_i = Y_i . (v_i - delta exp(G_i) S^T k_i) - delta sum_j M_ij (Y U^T)_ij
    W      = P * dP + M * dM                dG_i = sum_j W_ij - sum_j W_ji + the products of q_i and k_i with their
                                                   gradients through S, and minus those through dS
    dG_N  += sum of S' * dS,  S' the state behind the chunk           dg = reverse cumulative sum of dG

Three kernels, whose programs keep little: the first has what is 64 by 64 (dP, dM), the second BLOCK_K columns of dq and
dk, and the third adds up dbeta and dG. What the value heads of a key head have in common is added up before it is
multiplied by q and k, in fp32 and in the order of the heads. Where many heads share one, each of several programs has
some of them, and the results of the programs are added up afterwards.

All products of pairs of tokens are computed as their transposes, with the later token in the column: dP^T = U dO^T. As
left operands they are then what dk needs, and as right operands they give the transposes of the rest. No result of the
tensor cores is transposed to become an operand, which Triton before 3.7.1 does wrongly on Hopper.

Shapes: chunks of 64 tokens; S and dS (K, V), padded to BLOCK_K rows, in blocks of BLOCK_V columns.
"""

from __future__ import annotations

from liger_trainer.kernels.documents import CHUNK
from liger_trainer.kernels.recurrence.chunk_scan import (
    decay_between,
    load_decays,
    load_tile,
    load_values,
    store_tile,
)
from liger_trainer.kernels.runtime import tl, triton

_N = tl.constexpr(CHUNK)


@triton.jit
def _program(chunks_ptr, HEADS: tl.constexpr, SHARE: tl.constexpr, OF_PROGRAM: tl.constexpr, program):
    """The first token of a chunk and its tokens, the chunk, the key head and its part of the value heads."""
    parts: tl.constexpr = SHARE // OF_PROGRAM
    key_heads: tl.constexpr = HEADS // SHARE
    part = (program % parts).to(tl.int64)
    key_head = (program // parts % key_heads).to(tl.int64)
    chunk = (program // parts // key_heads).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    return first, tl.load(chunks_ptr + chunk * 3 + 2), chunk, key_head, part


@triton.jit
def pair_gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    skip_ptr,
    do_ptr,
    u_ptr,
    y_ptr,
    chunks_ptr,
    dv_ptr,
    dp_ptr,
    dm_ptr,
    dtotal_ptr,
    dbeta_ptr,
    dskip_ptr,
    scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    do_token,
    do_head,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    OF_PROGRAM: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of a chunk and OF_PROGRAM value heads of a key head: dP^T and dM^T, dv, and the terms of dG and dbeta of both."""
    first, tokens, chunk, key_head, part = _program(chunks_ptr, HEADS, SHARE, OF_PROGRAM, tl.program_id(0))
    place = tl.arange(0, _N)
    pairs = place[:, None] * _N + place[None, :]
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    k = load_tile(k_ptr + first * k_token + key_head * k_head, 0, k_token, tokens, 0, K, BLOCK_K)
    q = load_tile(q_ptr + first * q_token + key_head * q_head, 0, q_token, tokens, 0, K, BLOCK_K)
    kq = tl.dot(k, q.T, input_precision=PRECISION)
    if DELTA:
        kk = tl.dot(k, k.T, input_precision=PRECISION)
    dp_sum = tl.zeros((_N, _N), tl.float32)
    dm_sum = tl.zeros((_N, _N), tl.float32)
    for index in range(OF_PROGRAM):
        head = key_head * SHARE + part * OF_PROGRAM + index
        of_chunk = chunk * HEADS + head
        beta = tl.full((_N,), 1.0, tl.float32)
        if beta_ptr is not None:
            beta = load_values(beta_ptr + first * beta_token + head * beta_head, 0, beta_token, tokens)
        if skip_ptr is not None:
            skip = tl.load(skip_ptr + head).to(tl.float32)
        dp = tl.zeros((_N, _N), tl.float32)
        dm = tl.zeros((_N, _N), tl.float32)
        dbeta = tl.zeros((_N,), tl.float32)
        dskip = tl.zeros((_N,), tl.float32)
        for column in range(0, V, BLOCK_V):
            do = load_tile(do_ptr + first * do_token + head * do_head, 0, do_token, tokens, column, V, BLOCK_V)
            v = load_tile(v_ptr + first * v_token + head * v_head, 0, v_token, tokens, column, V, BLOCK_V)
            y = load_tile(y_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
            u = v  # without the delta rule that is U but for beta, which its products are multiplied by
            if DELTA:
                u = load_tile(u_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
                dm = tl.dot(u, y.T, dm, input_precision=PRECISION)
            dp = tl.dot(u, do.T, dp, input_precision=PRECISION)
            dv = beta[:, None] * y.to(tl.float32)
            if skip_ptr is not None:
                dv += skip * do.to(tl.float32)
                dskip += tl.sum(do.to(tl.float32) * v.to(tl.float32), 1)
            store_tile(dv_ptr + (first * HEADS + head) * V, dv, 0, HEADS * V, tokens, column, V, BLOCK_V)
            dbeta += tl.sum(y.to(tl.float32) * v.to(tl.float32), 1)
        total = tl.cumsum(load_decays(g_ptr + first * g_token + head * g_head, 0, g_token, tokens), 0)
        decay = decay_between(total, False, True)
        dp *= decay * scale
        if not DELTA:
            dp *= beta[:, None]
        dp_sum += dp
        weighted = dp * kq
        if DELTA:
            dm = tl.where(place[:, None] < place[None, :], dm * decay, 0.0)
            of_keys = dm * kk
            dbeta -= tl.sum(of_keys, 0)
            weighted -= of_keys * beta[None, :]
            dm_sum -= dm * beta[None, :]
        tl.store(dtotal_ptr + of_chunk * _N + place, tl.sum(weighted, 0) - tl.sum(weighted, 1))
        tl.store(dbeta_ptr + of_chunk * _N + place, dbeta)
        if dskip_ptr is not None:
            tl.store(dskip_ptr + of_chunk, tl.sum(dskip, 0))
    out = tl.program_id(0).to(tl.int64) * (_N * _N)
    tl.store(dp_ptr + out + pairs, dp_sum.to(dtype))
    if DELTA:
        tl.store(dm_ptr + out + pairs, dm_sum.to(dtype))


@triton.jit
def key_gradients_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    do_ptr,
    v_ptr,
    states_ptr,
    dstates_ptr,
    u_ptr,
    y_ptr,
    dp_ptr,
    dm_ptr,
    chunks_ptr,
    dq_ptr,
    dk_ptr,
    dtotal_ptr,
    dbeta_ptr,
    dlast_ptr,
    scale,
    part_stride,
    block_stride,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    do_token,
    do_head,
    v_token,
    v_head,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    OF_PROGRAM: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_K columns of dq and dk of a chunk and OF_PROGRAM value heads, and their terms of dG and dbeta."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    KEY_HEADS: tl.constexpr = HEADS // SHARE
    program = tl.program_id(0) // BLOCKS
    block = (tl.program_id(0) % BLOCKS).to(tl.int64)
    first_row = (tl.program_id(0) % BLOCKS) * BLOCK_K
    first, tokens, chunk, key_head, part = _program(chunks_ptr, HEADS, SHARE, OF_PROGRAM, program)
    place = tl.arange(0, _N)
    rows = first_row + tl.arange(0, BLOCK_K)
    q = load_tile(q_ptr + first * q_token + key_head * q_head, 0, q_token, tokens, first_row, K, BLOCK_K)
    k = load_tile(k_ptr + first * k_token + key_head * k_head, 0, k_token, tokens, first_row, K, BLOCK_K)
    pairs = program.to(tl.int64) * (_N * _N) + place[:, None] * _N + place[None, :]
    low = tl.load(dp_ptr + pairs)
    dq = tl.dot(k.T, low, input_precision=PRECISION).T
    dk = tl.dot(low, q, input_precision=PRECISION)
    if DELTA:
        low = tl.load(dm_ptr + pairs)
        dk = tl.dot(low, k, dk, input_precision=PRECISION)
        dk += tl.dot(k.T, low, input_precision=PRECISION).T
    for index in range(OF_PROGRAM):
        head = key_head * SHARE + part * OF_PROGRAM + index
        of_chunk = chunk * HEADS + head
        total = tl.cumsum(load_decays(g_ptr + first * g_token + head * g_head, 0, g_token, tokens), 0)
        last = tl.sum(tl.where(place == _N - 1, total, 0.0), 0)
        from_start = tl.exp(total)
        of_end = tl.exp(last - total)
        if beta_ptr is not None:
            beta = load_values(beta_ptr + first * beta_token + head * beta_head, 0, beta_token, tokens)
        if beta_ptr is not None and not DELTA:
            of_end *= beta
        dtotal = tl.zeros((_N,), tl.float32)
        dbeta = tl.zeros((_N,), tl.float32)
        ending = tl.zeros((_N,), tl.float32)
        both = tl.zeros((BLOCK_K,), tl.float32)
        for column in range(0, V, BLOCK_V):
            columns = column + tl.arange(0, BLOCK_V)
            mask = (rows < K)[:, None] & (columns < V)[None, :]
            of_state = of_chunk * (K * V) + rows[:, None] * V + columns[None, :]
            state = tl.load(states_ptr + of_state, mask=mask, other=0.0)
            do = load_tile(do_ptr + first * do_token + head * do_head, 0, do_token, tokens, column, V, BLOCK_V)
            through = tl.dot(do, state.T, input_precision=PRECISION) * (scale * from_start)[:, None]
            dq += through
            dtotal += tl.sum(q.to(tl.float32) * through, 1)
            if DELTA:
                y = load_tile(y_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
                through = tl.dot(y, state.T, input_precision=PRECISION) * from_start[:, None]
                dbeta -= tl.sum(k.to(tl.float32) * through, 1)
                dk -= through * beta[:, None]
                u = load_tile(u_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
            else:
                u = load_tile(v_ptr + first * v_token + head * v_head, 0, v_token, tokens, column, V, BLOCK_V)
            dstate = tl.load(dstates_ptr + of_state, mask=mask, other=0.0)
            through = tl.dot(u, dstate.T, input_precision=PRECISION) * of_end[:, None]
            dk += through
            ending += tl.sum(k.to(tl.float32) * through, 1)
            both += tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 1)
        if DELTA:
            dtotal += beta * dbeta
        out = block * block_stride + of_chunk * _N + place
        tl.store(dtotal_ptr + out, dtotal - ending)
        if DELTA:
            tl.store(dbeta_ptr + out, dbeta)
        dlast = tl.sum(ending, 0) + tl.exp(last) * tl.sum(both, 0)
        tl.store(dlast_ptr + block * (block_stride // _N) + of_chunk, dlast)
    out = part * part_stride + (first * KEY_HEADS + key_head) * K
    store_tile(dq_ptr + out, dq, 0, KEY_HEADS * K, tokens, first_row, K, BLOCK_K)
    store_tile(dk_ptr + out, dk, 0, KEY_HEADS * K, tokens, first_row, K, BLOCK_K)


@triton.jit
def gate_gradients_kernel(
    dtotal_ptr,
    dbeta_terms_ptr,
    dlast_ptr,
    chunks_ptr,
    dg_ptr,
    dbeta_ptr,
    block_stride,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    DELTA: tl.constexpr,
):
    """Sums dg and dbeta of a chunk and value head: the terms of pairs, then those of blocks of rows."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    place = tl.arange(0, _N)
    inside = place < tl.load(chunks_ptr + chunk * 3 + 2)
    out = (first + place) * HEADS + head
    of_chunk = chunk * HEADS + head
    dtotal = tl.load(dtotal_ptr + of_chunk * _N + place)
    dbeta = tl.load(dbeta_terms_ptr + of_chunk * _N + place)
    dlast = 0.0
    for block in tl.static_range(BLOCKS):
        terms = (block + 1) * block_stride + of_chunk * _N + place
        dtotal += tl.load(dtotal_ptr + terms)
        if DELTA:
            dbeta += tl.load(dbeta_terms_ptr + terms)
        dlast += tl.load(dlast_ptr + block * (block_stride // _N) + of_chunk)
    if dg_ptr is not None:
        tl.store(dg_ptr + out, tl.cumsum(dtotal, 0, reverse=True) + dlast, mask=inside)
    if dbeta_ptr is not None:
        tl.store(dbeta_ptr + out, dbeta.to(dbeta_ptr.dtype.element_ty), mask=inside)
