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

The sums over tokens of the value heads that share a key head are added up before they are multiplied by q and k, in
fp32 and in the order of the heads. Where many heads share one, each of several programs has some of them, and the
results of the programs are added up afterwards.

All products of pairs of tokens are computed as their transposes, with the later token in the column: dP^T = U dO^T. As
the left operand, P^T and M^T are then as they are needed, and as the right one they give the transposes of the rest.
No result of the tensor cores is transposed to become an operand, which Triton before 3.7.1 does wrongly on Hopper.

Shapes: chunks of 64 tokens; S and dS (K, V), padded to BLOCK_K rows, in blocks of BLOCK_V columns.
"""

from __future__ import annotations

from liger_trainer.kernels.documents import CHUNK
from liger_trainer.kernels.recurrence.chunk_scan import (
    decay_between,
    load_decays,
    load_tile,
    load_values,
    state_mask,
    state_pointers,
    store_tile,
)
from liger_trainer.kernels.runtime import tl, triton

_N = tl.constexpr(CHUNK)


@triton.jit
def chunk_gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    skip_ptr,
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
    dskip_ptr,
    scale,
    part_stride,
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
    """One chunk and key head, and OF_PROGRAM of its value heads."""
    KEY_HEADS: tl.constexpr = HEADS // SHARE
    PARTS: tl.constexpr = SHARE // OF_PROGRAM
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    part = (tl.program_id(0) % PARTS).to(tl.int64)
    key_head = (tl.program_id(0) // PARTS % KEY_HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // PARTS // KEY_HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    place = tl.arange(0, _N)
    q = load_tile(q_ptr + first * q_token + key_head * q_head, 0, q_token, tokens, 0, K, BLOCK_K)
    k = load_tile(k_ptr + first * k_token + key_head * k_head, 0, k_token, tokens, 0, K, BLOCK_K)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    dq = tl.zeros((_N, BLOCK_K), tl.float32)
    dk = tl.zeros((_N, BLOCK_K), tl.float32)
    dp_sum = tl.zeros((_N, _N), tl.float32)  # of all value heads: dP^T with its decays
    dm_sum = tl.zeros((_N, _N), tl.float32)  # the same of dM^T

    for index in range(OF_PROGRAM):
        head = key_head * SHARE + part * OF_PROGRAM + index
        total = tl.cumsum(load_decays(g_ptr + first * g_token + head * g_head, 0, g_token, tokens), 0)
        last = tl.sum(tl.where(place == _N - 1, total, 0.0), 0)
        from_start, to_end = tl.exp(total), tl.exp(last - total)
        beta = tl.full((_N,), 1.0, tl.float32)
        if beta_ptr is not None:
            beta = load_values(beta_ptr + first * beta_token + head * beta_head, 0, beta_token, tokens)
        if skip_ptr is not None:
            skip = tl.load(skip_ptr + head).to(tl.float32)
        of_chunk = chunk * HEADS + head
        dp = tl.zeros((_N, _N), tl.float32)
        dm = tl.zeros((_N, _N), tl.float32)
        dtotal = tl.zeros((_N,), tl.float32)
        dbeta = tl.zeros((_N,), tl.float32)
        dlast = tl.zeros((_N,), tl.float32)
        dskip = tl.zeros((_N,), tl.float32)
        for block in range(BLOCKS):
            column = block * BLOCK_V
            do = load_tile(do_ptr + first * do_token + head * do_head, 0, do_token, tokens, column, V, BLOCK_V)
            v = load_tile(v_ptr + first * v_token + head * v_head, 0, v_token, tokens, column, V, BLOCK_V)
            y = load_tile(y_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
            mask = state_mask(column, K, V, BLOCK_K, BLOCK_V)
            of_state = state_pointers(of_chunk * (K * V), column, V, BLOCK_K, BLOCK_V)
            state = tl.load(states_ptr + of_state, mask=mask, other=0.0)
            dstate = tl.load(dstates_ptr + of_state, mask=mask, other=0.0)
            u = v  # without the delta rule that is U but for beta, which its products are multiplied by
            if DELTA:
                u = load_tile(u_ptr + of_chunk * (_N * V), 0, V, _N, column, V, BLOCK_V)
            wide = y.to(tl.float32)
            dv = beta[:, None] * wide
            if skip_ptr is not None:
                dv += skip * do.to(tl.float32)
                dskip += tl.sum(do.to(tl.float32) * v.to(tl.float32), 1)
            store_tile(dv_ptr + (first * HEADS + head) * V, dv, 0, HEADS * V, tokens, column, V, BLOCK_V)
            dbeta += tl.sum(wide * v.to(tl.float32), 1)

            dp = tl.dot(u, do.T, dp, input_precision=PRECISION)
            through = tl.dot(do, state.T, input_precision=PRECISION) * (scale * from_start)[:, None]
            dq += through
            dtotal += tl.sum(q.to(tl.float32) * through, 1)
            if DELTA:
                dm = tl.dot(u, y.T, dm, input_precision=PRECISION)
                through = tl.dot(y, state.T, input_precision=PRECISION) * from_start[:, None]
                along = tl.sum(k.to(tl.float32) * through, 1)
                dbeta -= along
                dtotal -= beta * along
                dk -= through * beta[:, None]
            through = tl.dot(u, dstate.T, input_precision=PRECISION) * (to_end if DELTA else to_end * beta)[:, None]
            dk += through
            along = tl.sum(k.to(tl.float32) * through, 1)
            dtotal -= along
            dlast += along
            dlast += tl.sum(tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0), 0) * tl.exp(last) * (1.0 / _N)

        decay = decay_between(total, False, True)
        dp *= decay * scale
        if not DELTA:
            dp *= beta[:, None]
        dp_sum += dp
        weighted = dp * tl.dot(k, q.T, input_precision=PRECISION)
        if DELTA:
            dm = tl.where(place[:, None] < place[None, :], dm * decay, 0.0)
            of_keys = dm * tl.dot(k, k.T, input_precision=PRECISION)
            dbeta -= tl.sum(of_keys, 0)
            weighted -= of_keys * beta[None, :]
            dm_sum -= dm * beta[None, :]
        if dg_ptr is not None:
            dtotal += tl.sum(weighted, 0)
            dtotal -= tl.sum(weighted, 1)
            dg = tl.cumsum(dtotal, 0, reverse=True) + tl.sum(dlast, 0)
            tl.store(dg_ptr + (first + place) * HEADS + head, dg, mask=place < tokens)
        if dbeta_ptr is not None:
            tl.store(
                dbeta_ptr + (first + place) * HEADS + head, dbeta.to(dbeta_ptr.dtype.element_ty), mask=place < tokens
            )
        if dskip_ptr is not None:
            tl.store(dskip_ptr + of_chunk, tl.sum(dskip, 0))

    low = dp_sum.to(dtype)
    dq += tl.dot(k.T, low, input_precision=PRECISION).T
    dk = tl.dot(low, q, dk, input_precision=PRECISION)
    if DELTA:
        low = dm_sum.to(dtype)
        dk = tl.dot(low, k, dk, input_precision=PRECISION)
        dk += tl.dot(k.T, low, input_precision=PRECISION).T
    out = part * part_stride + (first * KEY_HEADS + key_head) * K
    store_tile(dq_ptr + out, dq, 0, KEY_HEADS * K, tokens, 0, K, BLOCK_K)
    store_tile(dk_ptr + out, dk, 0, KEY_HEADS * K, tokens, 0, K, BLOCK_K)
