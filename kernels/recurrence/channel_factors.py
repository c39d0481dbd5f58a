"""What the scans take of each chunk where every channel of the keys has a decay of its own (KDA).

With G the running sum of g inside a chunk of N tokens, the scans multiply the state by

    Qh = q exp(G)       Kh = k exp(G)       Kt = k exp(G_N - G)

and the tokens of a chunk meet each other in

    P_ij = sum_c q_ic k_jc exp(G_ic - G_jc)  for j <= i         M_ij = the same with k_i for q_i, for j < i

Neither exp(-G) nor exp(G_i - G_j) for each pair of tokens and channel is computed: the first overflows where a gate
forgets, and the second takes most of the time. A chunk is halved, its halves are halved, and so on to single tokens.
Each pair of tokens is in two halves of one part, on one of six levels. With m the last token of the first half,

    exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j)

so each token has one factor a level, which is at most 1 whatever the gates are, and a level is a product of matrices of
which only its own pairs are kept.

Shapes: chunks of 64 tokens; q, k (tokens, K), in blocks of BLOCK_K columns.
"""

from __future__ import annotations

from liger_trainer.kernels.documents import CHUNK
from liger_trainer.kernels.recurrence.chunk_scan import load_tile, load_values, store_tile
from liger_trainer.kernels.runtime import tl, triton

_N = tl.constexpr(CHUNK)
LEVELS = tl.constexpr(CHUNK.bit_length() - 1)
"""How often a chunk is halved."""


@triton.jit
def load_totals(base, token_stride, place, first_column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """G of the tokens at `place` in a chunk."""
    columns = first_column + tl.arange(0, BLOCK_K)
    return tl.load(base + place[:, None] * token_stride + columns[None, :], mask=(columns < K)[None, :], other=0.0)


@triton.jit
def level_decays(base, token_stride, tokens, total, half, first_column, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """exp(G_i - G_m) of tokens in second halves of `half` tokens, and exp(G_m - G_j) of those in first ones."""
    middle = (tl.arange(0, _N) & -(2 * half)) + half - 1
    middle = load_totals(base, token_stride, tl.minimum(middle, tokens - 1), first_column, K, BLOCK_K)
    return tl.exp(-tl.abs(total - middle))


@triton.jit
def level_pairs(half, ROW_LATER: tl.constexpr):
    """The pairs of tokens of a level: rows in second halves and columns in the first ones before them, or reversed."""
    row, column = tl.arange(0, _N)[:, None], tl.arange(0, _N)[None, :]
    apart = row ^ column
    of_level = (apart >= half) & (apart < 2 * half)
    return of_level & ((row > column) if ROW_LATER else (row < column))


@triton.jit
def channel_totals_kernel(
    g_ptr, chunks_ptr, out_ptr, g_token, g_head, HEADS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    """G of one chunk, value head and block of channels, fp32 (T, HEADS, K). As in `load_decays`, -100 is the least."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    column = tl.program_id(0) % BLOCKS * BLOCK_K
    head = (tl.program_id(0) // BLOCKS % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // BLOCKS // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    g = load_tile(g_ptr + first * g_token + head * g_head, 0, g_token, tokens, column, K, BLOCK_K).to(tl.float32)
    total = tl.cumsum(tl.where(g < -100.0, -100.0, g), 0)  # NaN stays
    store_tile(out_ptr + (first * HEADS + head) * K, total, 0, HEADS * K, tokens, column, K, BLOCK_K)


@triton.jit
def channel_factors_kernel(
    q_ptr,
    k_ptr,
    totals_ptr,
    beta_ptr,
    chunks_ptr,
    from_start_q_ptr,
    from_start_k_ptr,
    to_end_k_ptr,
    decay_ptr,
    products_ptr,
    solve_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    beta_token,
    beta_head,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Qh, Kh, Kt, exp(G_N) and P of one chunk and value head, and diag(beta) M if there is `solve_ptr`."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    of_chunk = chunk * HEADS + head
    q_ptr += first * q_token + head // SHARE * q_head
    k_ptr += first * k_token + head // SHARE * k_head
    out = (first * HEADS + head) * K
    totals_ptr += out
    place = tl.arange(0, _N)
    square = place[:, None] * _N + place[None, :]
    products = tl.zeros((_N, _N), tl.float32)
    own = tl.zeros((_N,), tl.float32)  # the diagonal of P
    if solve_ptr is not None:
        solve = tl.zeros((_N, _N), tl.float32)

    for column in range(0, K, BLOCK_K):
        q = load_tile(q_ptr, 0, q_token, tokens, column, K, BLOCK_K).to(tl.float32)
        k = load_tile(k_ptr, 0, k_token, tokens, column, K, BLOCK_K).to(tl.float32)
        total = load_totals(totals_ptr, HEADS * K, tl.minimum(place, tokens - 1), column, K, BLOCK_K)
        columns = column + tl.arange(0, BLOCK_K)
        last = tl.load(totals_ptr + (tokens - 1) * (HEADS * K) + columns, mask=columns < K, other=0.0)
        tl.store(decay_ptr + of_chunk * K + columns, tl.exp(last), mask=columns < K)
        from_start = tl.exp(total)
        store_tile(from_start_q_ptr + out, q * from_start, 0, HEADS * K, tokens, column, K, BLOCK_K)
        store_tile(from_start_k_ptr + out, k * from_start, 0, HEADS * K, tokens, column, K, BLOCK_K)
        to_end = tl.exp(last[None, :] - total)
        store_tile(to_end_k_ptr + out, k * to_end, 0, HEADS * K, tokens, column, K, BLOCK_K)
        own += tl.sum(q * k, 1)
        for level in range(LEVELS):
            decay = level_decays(totals_ptr, HEADS * K, tokens, total, 1 << level, column, K, BLOCK_K)
            pairs = level_pairs(1 << level, True)
            known = k * decay
            found = tl.dot(q * decay, known.T, input_precision=PRECISION)
            products += tl.where(pairs, found, 0.0)
            if solve_ptr is not None:
                found = tl.dot(known, known.T, input_precision=PRECISION)
                solve += tl.where(pairs, found, 0.0)

    products = tl.where(place[:, None] == place[None, :], own[:, None], products)
    tl.store(products_ptr + of_chunk * (_N * _N) + square, products.to(products_ptr.dtype.element_ty))
    if solve_ptr is not None:
        beta = load_values(beta_ptr + first * beta_token + head * beta_head, 0, beta_token, tokens)
        tl.store(solve_ptr + of_chunk * (_N * _N) + square, solve * beta[:, None])
