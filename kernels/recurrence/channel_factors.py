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
which only its own pairs are kept. G is kept in units of ln 2, as exp2 is one instruction where exp is several.

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
    return tl.exp2(-tl.abs(total - middle))


@triton.jit
def level_pairs(half, BOTH_ORDERS: tl.constexpr):
    """The pairs of tokens of a level: rows in second halves and columns in the first ones before them, or both ways."""
    place = tl.arange(0, _N)
    other = (place & -half) ^ half
    if not BOTH_ORDERS:
        other = tl.where((place & half) != 0, other, -1)
    return other[:, None] == (place & -half)[None, :]


@triton.jit
def channel_factors_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    chunks_ptr,
    totals_ptr,
    from_start_q_ptr,
    from_start_k_ptr,
    to_end_k_ptr,
    decay_ptr,
    q_token,
    q_head,
    k_token,
    k_head,
    g_token,
    g_head,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """G, Qh, Kh, Kt and exp(G_N) of one chunk, value head and block of channels. As in `load_decays`, -100 is least."""
    BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    column = tl.program_id(0) % BLOCKS * BLOCK_K
    head = (tl.program_id(0) // BLOCKS % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // BLOCKS // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    out = (first * HEADS + head) * K
    g = load_tile(g_ptr + first * g_token + head * g_head, 0, g_token, tokens, column, K, BLOCK_K).to(tl.float32)
    g = tl.where(g < -100.0, -100.0, g) * 1.4426950408889634  # NaN stays
    total = tl.cumsum(g, 0)
    last = tl.sum(g, 0)
    store_tile(totals_ptr + out, total, 0, HEADS * K, tokens, column, K, BLOCK_K)
    columns = column + tl.arange(0, BLOCK_K)
    tl.store(decay_ptr + (chunk * HEADS + head) * K + columns, tl.exp2(last), mask=columns < K)
    from_start = tl.exp2(total)
    q = load_tile(q_ptr + first * q_token + head // SHARE * q_head, 0, q_token, tokens, column, K, BLOCK_K)
    store_tile(from_start_q_ptr + out, q * from_start, 0, HEADS * K, tokens, column, K, BLOCK_K)
    k = load_tile(k_ptr + first * k_token + head // SHARE * k_head, 0, k_token, tokens, column, K, BLOCK_K)
    store_tile(from_start_k_ptr + out, k * from_start, 0, HEADS * K, tokens, column, K, BLOCK_K)
    to_end = tl.exp2(last[None, :] - total)
    store_tile(to_end_k_ptr + out, k * to_end, 0, HEADS * K, tokens, column, K, BLOCK_K)


@triton.jit
def channel_products_kernel(
    q_ptr,
    k_ptr,
    totals_ptr,
    beta_ptr,
    chunks_ptr,
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
    """P of one chunk and value head, and diag(beta) M if there is `solve_ptr`."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    q_ptr += first * q_token + head // SHARE * q_head
    k_ptr += first * k_token + head // SHARE * k_head
    totals_ptr += (first * HEADS + head) * K
    place = tl.arange(0, _N)
    own = tl.zeros((_N,), tl.float32)  # the diagonal of P
    for column in range(0, K, BLOCK_K):
        q = load_tile(q_ptr, 0, q_token, tokens, column, K, BLOCK_K).to(tl.float32)
        own += tl.sum(q * load_tile(k_ptr, 0, k_token, tokens, column, K, BLOCK_K), 1)
    products = tl.where(place[:, None] == place[None, :], own[:, None], 0.0)
    if solve_ptr is not None:
        solve = tl.zeros((_N, _N), tl.float32)

    for level in range(LEVELS):
        asked = tl.zeros((_N, _N), tl.float32)
        if solve_ptr is not None:
            solved = tl.zeros((_N, _N), tl.float32)
        for column in range(0, K, BLOCK_K):
            total = load_totals(totals_ptr, HEADS * K, tl.minimum(place, tokens - 1), column, K, BLOCK_K)
            decay = level_decays(totals_ptr, HEADS * K, tokens, total, 1 << level, column, K, BLOCK_K)
            known = load_tile(k_ptr, 0, k_token, tokens, column, K, BLOCK_K) * decay
            q = load_tile(q_ptr, 0, q_token, tokens, column, K, BLOCK_K)
            asked = tl.dot(q * decay, known.T, asked, input_precision=PRECISION)
            if solve_ptr is not None:
                solved = tl.dot(known, known.T, solved, input_precision=PRECISION)
        pairs = level_pairs(1 << level, False)
        products = tl.where(pairs, asked, products)
        if solve_ptr is not None:
            solve = tl.where(pairs, solved, solve)

    out = (chunk * HEADS + head) * (_N * _N) + place[:, None] * _N + place[None, :]
    tl.store(products_ptr + out, products.to(products_ptr.dtype.element_ty))
    if solve_ptr is not None:
        beta = load_values(beta_ptr + first * beta_token + head * beta_head, 0, beta_token, tokens)
        tl.store(solve_ptr + out, solve * beta[:, None])
