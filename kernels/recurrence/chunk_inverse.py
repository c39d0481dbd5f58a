"""The inverse that the delta rule needs of each chunk: T = (I + diag(beta) M)^-1, with M of `chunked.py`.

    M_ij = k_i . k_j exp(G_i - G_j)  for j < i, else 0

The halves of a chunk, of 32 tokens, are inverted by elimination, and what is below them follows from both. Products of
squares of M, (I - M)(I + M^2)(I + M^4).., would need fewer steps, but their terms grow to 1e9 times the result where
keys repeat. Everything is in fp32; products of rounded blocks lose two digits more than the rounding of T.

Shapes: C chunks of 64 tokens; tiles are 32 by 32, in one warp.
"""

from __future__ import annotations

from liger_trainer.kernels.documents import CHUNK
from liger_trainer.kernels.runtime import tl, triton

_N = tl.constexpr(CHUNK)
_HALF = tl.constexpr(CHUNK // 2)


@triton.jit
def _keys(k_ptr, k_token, first, tokens, columns, K: tl.constexpr):
    """Half of the rows of the keys and some columns, zeros behind the last token."""
    rows = first + tl.arange(0, _HALF)
    mask = (rows < tokens)[:, None] & (columns < K)[None, :]
    return tl.load(k_ptr + rows[:, None] * k_token + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _gates(g_ptr, g_token, beta_ptr, beta_token, first, tokens, before):
    """G and beta of half of the tokens, and G behind them."""
    rows = first + tl.arange(0, _HALF)
    g = tl.load(g_ptr + rows * g_token, mask=rows < tokens, other=0.0).to(tl.float32)
    g = tl.where(g < -100.0, -100.0, g)  # as `load_decays`
    beta = tl.load(beta_ptr + rows * beta_token, mask=rows < tokens, other=0.0).to(tl.float32)
    return before + tl.cumsum(g, 0), beta, before + tl.sum(g, 0)


@triton.jit
def _diagonal(products, beta, total):
    """A block of diag(beta) M on the diagonal."""
    place = tl.arange(0, _HALF)
    behind = place[:, None] > place[None, :]
    difference = tl.where(behind, total[:, None] - total[None, :], 0.0)
    return tl.where(behind, products * beta[:, None] * tl.exp(difference), 0.0)


@triton.jit
def _eliminated(inverse, block, step):
    """`inverse` after row `step`, which is final, was taken off the rows behind it."""
    place = tl.arange(0, _HALF)
    column = tl.sum(tl.where(place[None, :] == step, block, 0.0), axis=1)
    row = tl.sum(tl.where(place[:, None] == step, inverse, 0.0), axis=0)
    return inverse - column[:, None] * row[None, :]


@triton.jit
def chunk_inverse_kernel(
    k_ptr,
    g_ptr,
    beta_ptr,
    solve_ptr,
    chunks_ptr,
    out_ptr,
    k_token,
    k_head,
    g_token,
    g_head,
    beta_token,
    beta_head,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """T of one chunk and value head, (C, HEADS, 64, 64), of diag(beta) M in fp32 if there is `solve_ptr`."""
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    chunk = (tl.program_id(0) // HEADS).to(tl.int64)
    first = tl.load(chunks_ptr + chunk * 3 + 1).to(tl.int64)
    tokens = tl.load(chunks_ptr + chunk * 3 + 2)
    place = tl.arange(0, _HALF)
    block = place[:, None] * _N + place[None, :]
    out_ptr += (chunk * HEADS + head) * (_N * _N) + block

    if solve_ptr is None:
        k_ptr += first * k_token + head // SHARE * k_head
        g_ptr += first * g_token + head * g_head
        beta_ptr += first * beta_token + head * beta_head
        early = tl.zeros((_HALF, _HALF), tl.float32)
        below = tl.zeros((_HALF, _HALF), tl.float32)
        late = tl.zeros((_HALF, _HALF), tl.float32)
        for begin in range(0, K, BLOCK_K):
            columns = begin + tl.arange(0, BLOCK_K)
            k0 = _keys(k_ptr, k_token, 0, tokens, columns, K)
            k1 = _keys(k_ptr, k_token, _HALF, tokens, columns, K)
            early = tl.dot(k0, k0.T, early, input_precision=PRECISION)
            below = tl.dot(k1, k0.T, below, input_precision=PRECISION)
            late = tl.dot(k1, k1.T, late, input_precision=PRECISION)
        total0, beta0, before = _gates(g_ptr, g_token, beta_ptr, beta_token, 0, tokens, 0.0)
        total1, beta1, _ = _gates(g_ptr, g_token, beta_ptr, beta_token, _HALF, tokens, before)
        early = _diagonal(early, beta0, total0)
        below *= beta1[:, None] * tl.exp(total1[:, None] - total0[None, :])
        late = _diagonal(late, beta1, total1)
    else:
        solve_ptr += (chunk * HEADS + head) * (_N * _N) + block
        early = tl.load(solve_ptr)
        below = tl.load(solve_ptr + _HALF * _N)
        late = tl.load(solve_ptr + _HALF * (_N + 1))

    t0 = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    t1 = t0
    for step in range(_HALF - 1):
        t0 = _eliminated(t0, early, step)
        t1 = _eliminated(t1, late, step)
    below = tl.dot(tl.dot(t1, below, input_precision=PRECISION), t0, input_precision=PRECISION)

    dtype: tl.constexpr = out_ptr.dtype.scalar.element_ty
    tl.store(out_ptr, t0.to(dtype))
    tl.store(out_ptr + _HALF, tl.zeros((_HALF, _HALF), dtype))
    tl.store(out_ptr + _HALF * _N, (-below).to(dtype))
    tl.store(out_ptr + _HALF * (_N + 1), t1.to(dtype))
