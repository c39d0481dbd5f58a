"""The inverse that the delta rule needs of each chunk: T = (I + diag(beta) M)^-1, with M of `chunked.py`.

    M_ij = k_i . k_j exp(G_i - G_j)  for j < i, else 0

The four diagonal blocks of 16 tokens are inverted by elimination, the others are merged from them. Products of squares
of M, (I - M)(I + M^2)(I + M^4).., would need fewer steps, but their terms grow to 1e9 times the result where keys
repeat. Everything is in fp32; merges of rounded blocks lose two digits more than the rounding of T.

Shapes: C chunks of 64 tokens; tiles are 16 by 16, in one warp.
"""

from __future__ import annotations

from liger_trainer.kernels.runtime import tl, triton


@triton.jit
def _keys(k_ptr, k_token, first, tokens, columns, K: tl.constexpr):
    """16 rows of the keys and some columns, zeros behind the last token."""
    rows = first + tl.arange(0, 16)
    mask = (rows < tokens)[:, None] & (columns < K)[None, :]
    return tl.load(k_ptr + rows[:, None] * k_token + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _gates(g_ptr, g_token, beta_ptr, beta_token, first, tokens, before):
    """G and beta of 16 tokens, and G behind them."""
    rows = first + tl.arange(0, 16)
    g = tl.load(g_ptr + rows * g_token, mask=rows < tokens, other=0.0).to(tl.float32)
    g = tl.where(g < -100.0, -100.0, g)  # as `load_decays`
    beta = tl.load(beta_ptr + rows * beta_token, mask=rows < tokens, other=0.0).to(tl.float32)
    return before + tl.cumsum(g, 0), beta, before + tl.sum(g, 0)


@triton.jit
def _below(products, beta, total, other_total):
    """A block of diag(beta) M whose rows all come behind its columns."""
    return products * beta[:, None] * tl.exp(total[:, None] - other_total[None, :])


@triton.jit
def _diagonal(products, beta, total):
    """A block of diag(beta) M on the diagonal."""
    place = tl.arange(0, 16)
    behind = place[:, None] > place[None, :]
    difference = tl.where(behind, total[:, None] - total[None, :], 0.0)
    return tl.where(behind, products * beta[:, None] * tl.exp(difference), 0.0)


@triton.jit
def _eliminated(inverse, block, step):
    """`inverse` after row `step`, which is final, was taken off the rows behind it."""
    place = tl.arange(0, 16)
    column = tl.sum(tl.where(place[None, :] == step, block, 0.0), axis=1)
    row = tl.sum(tl.where(place[:, None] == step, inverse, 0.0), axis=0)
    return inverse - column[:, None] * row[None, :]


@triton.jit
def _product(left, right, PRECISION: tl.constexpr):
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _load(solve_ptr, ROW: tl.constexpr, COLUMN: tl.constexpr):
    place = tl.arange(0, 16)
    return tl.load(solve_ptr + (ROW * 16 + place)[:, None] * 64 + (COLUMN * 16 + place)[None, :])


@triton.jit
def _store(out_ptr, block, ROW: tl.constexpr, COLUMN: tl.constexpr):
    place = tl.arange(0, 16)
    offset = (ROW * 16 + place)[:, None] * 64 + (COLUMN * 16 + place)[None, :]
    tl.store(out_ptr + offset, block.to(out_ptr.dtype.element_ty))


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
    out_ptr += (chunk * HEADS + head) * 4096

    if solve_ptr is None:
        k_ptr += first * k_token + head // SHARE * k_head
        g_ptr += first * g_token + head * g_head
        beta_ptr += first * beta_token + head * beta_head
        m00 = tl.zeros((16, 16), tl.float32)
        m10 = m00
        m11 = m00
        m20 = m00
        m21 = m00
        m22 = m00
        m30 = m00
        m31 = m00
        m32 = m00
        m33 = m00
        for begin in tl.static_range(0, K, BLOCK_K):
            columns = begin + tl.arange(0, BLOCK_K)
            k0 = _keys(k_ptr, k_token, 0, tokens, columns, K)
            k1 = _keys(k_ptr, k_token, 16, tokens, columns, K)
            k2 = _keys(k_ptr, k_token, 32, tokens, columns, K)
            k3 = _keys(k_ptr, k_token, 48, tokens, columns, K)
            m00 = tl.dot(k0, k0.T, m00, input_precision=PRECISION)
            m10 = tl.dot(k1, k0.T, m10, input_precision=PRECISION)
            m11 = tl.dot(k1, k1.T, m11, input_precision=PRECISION)
            m20 = tl.dot(k2, k0.T, m20, input_precision=PRECISION)
            m21 = tl.dot(k2, k1.T, m21, input_precision=PRECISION)
            m22 = tl.dot(k2, k2.T, m22, input_precision=PRECISION)
            m30 = tl.dot(k3, k0.T, m30, input_precision=PRECISION)
            m31 = tl.dot(k3, k1.T, m31, input_precision=PRECISION)
            m32 = tl.dot(k3, k2.T, m32, input_precision=PRECISION)
            m33 = tl.dot(k3, k3.T, m33, input_precision=PRECISION)

        total0, beta0, before = _gates(g_ptr, g_token, beta_ptr, beta_token, 0, tokens, 0.0)
        total1, beta1, before = _gates(g_ptr, g_token, beta_ptr, beta_token, 16, tokens, before)
        total2, beta2, before = _gates(g_ptr, g_token, beta_ptr, beta_token, 32, tokens, before)
        total3, beta3, before = _gates(g_ptr, g_token, beta_ptr, beta_token, 48, tokens, before)
        m00 = _diagonal(m00, beta0, total0)
        m11 = _diagonal(m11, beta1, total1)
        m22 = _diagonal(m22, beta2, total2)
        m33 = _diagonal(m33, beta3, total3)
        m10 = _below(m10, beta1, total1, total0)
        m20 = _below(m20, beta2, total2, total0)
        m21 = _below(m21, beta2, total2, total1)
        m30 = _below(m30, beta3, total3, total0)
        m31 = _below(m31, beta3, total3, total1)
        m32 = _below(m32, beta3, total3, total2)
    else:
        solve_ptr += (chunk * HEADS + head) * 4096
        m00 = _load(solve_ptr, 0, 0)
        m10 = _load(solve_ptr, 1, 0)
        m11 = _load(solve_ptr, 1, 1)
        m20 = _load(solve_ptr, 2, 0)
        m21 = _load(solve_ptr, 2, 1)
        m22 = _load(solve_ptr, 2, 2)
        m30 = _load(solve_ptr, 3, 0)
        m31 = _load(solve_ptr, 3, 1)
        m32 = _load(solve_ptr, 3, 2)
        m33 = _load(solve_ptr, 3, 3)

    place = tl.arange(0, 16)
    t0 = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    t1 = t0
    t2 = t0
    t3 = t0
    for step in range(15):
        t0 = _eliminated(t0, m00, step)
        t1 = _eliminated(t1, m11, step)
        t2 = _eliminated(t2, m22, step)
        t3 = _eliminated(t3, m33, step)

    t10 = -_product(_product(t1, m10, PRECISION), t0, PRECISION)
    t21 = -_product(_product(t2, m21, PRECISION), t1, PRECISION)
    t32 = -_product(_product(t3, m32, PRECISION), t2, PRECISION)
    t20 = -_product(t2, _product(m20, t0, PRECISION) + _product(m21, t10, PRECISION), PRECISION)
    t31 = -_product(t3, _product(m31, t1, PRECISION) + _product(m32, t21, PRECISION), PRECISION)
    t30 = _product(m30, t0, PRECISION) + _product(m31, t10, PRECISION) + _product(m32, t20, PRECISION)
    t30 = -_product(t3, t30, PRECISION)

    zero = tl.zeros((16, 16), tl.float32)
    _store(out_ptr, t0, 0, 0)
    _store(out_ptr, zero, 0, 1)
    _store(out_ptr, zero, 0, 2)
    _store(out_ptr, zero, 0, 3)
    _store(out_ptr, t10, 1, 0)
    _store(out_ptr, t1, 1, 1)
    _store(out_ptr, zero, 1, 2)
    _store(out_ptr, zero, 1, 3)
    _store(out_ptr, t20, 2, 0)
    _store(out_ptr, t21, 2, 1)
    _store(out_ptr, t2, 2, 2)
    _store(out_ptr, zero, 2, 3)
    _store(out_ptr, t30, 3, 0)
    _store(out_ptr, t31, 3, 1)
    _store(out_ptr, t32, 3, 2)
    _store(out_ptr, t3, 3, 3)
