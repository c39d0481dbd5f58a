"""The chunks of a document one after another, forward and backward, with the state in registers.

A program has BLOCK_V columns of the state of one value head and document: columns do not depend on each other. The
forward keeps S and writes the results of each chunk, or, in the backward, the state that each chunk begins with and U.
The reverse scan keeps dS, the gradient of the state behind a chunk, and writes it for each chunk, with Y:

    dU = P^T dO + exp(G_N - G) (k dS)       (I + delta diag(beta) M)^T Y = dU
    dS of the chunk before = exp(G_N) dS + (q exp(G))^T dO - delta (k exp(G))^T diag(beta) Y

with dO already times scale. Documents with a parent are scanned after all others, and before them in reverse. They
begin with their parent's final state, whose gradient is the sum of theirs in the order of the children.

Factors exp(G) multiply the rows of products, not keys and queries, so that these go from memory to the tensor cores as
they are. Where every channel has a decay of its own, `channel_factors.py` has multiplied both: then there is no g, `q`
and `k` are q exp(G) and k exp(G), `to_end_k` is k exp(G_N - G), and `decay` and `products` are exp(G_N) and P.

Shapes: chunks of 64 tokens; S (K, V), padded to BLOCK_K rows; U, Y and T of all chunks, see `launch.py`.
"""

from __future__ import annotations

from liger_trainer.kernels.documents import CHILDREN, CHUNK, FIRST, FIRST_CHILD, FIRST_CHUNK, PARENT, TOKENS
from liger_trainer.kernels.runtime import tl, triton

_N = tl.constexpr(CHUNK)
_FIRST = tl.constexpr(FIRST)
_TOKENS = tl.constexpr(TOKENS)
_PARENT = tl.constexpr(PARENT)
_FIRST_CHILD = tl.constexpr(FIRST_CHILD)
_CHILDREN = tl.constexpr(CHILDREN)
_FIRST_CHUNK = tl.constexpr(FIRST_CHUNK)


@triton.jit
def load_tile(base, start, token_stride, tokens, first_column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """The (64, BLOCK) tile of a head's rows from `start`: zeros behind the last token and the last column."""
    rows = tl.arange(0, _N)
    columns = first_column + tl.arange(0, BLOCK)
    mask = (start + rows < tokens)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + start * token_stride + rows[:, None] * token_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_tile(base, tile, start, token_stride, tokens, first_column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what `load_tile` reads."""
    rows = tl.arange(0, _N)
    columns = first_column + tl.arange(0, BLOCK)
    mask = (start + rows < tokens)[:, None] & (columns < WIDTH)[None, :]
    pointers = base + start * token_stride + rows[:, None] * token_stride + columns[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def load_values(base, start, token_stride, tokens):
    """A number of each of 64 tokens in fp32, 0 behind the last one."""
    rows = tl.arange(0, _N)
    return tl.load(base + start * token_stride + rows * token_stride, mask=start + rows < tokens, other=0.0).to(
        tl.float32
    )


@triton.jit
def load_channels(base, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """A number of each channel of the keys."""
    channels = tl.arange(0, BLOCK_K)
    return tl.load(base + channels, mask=channels < K, other=0.0)


@triton.jit
def load_decays(base, start, token_stride, tokens):
    """The logarithms of the decays of 64 tokens.

    Below -100 they are as good as -100. A larger number would take the last digits off the sums behind it.
    """
    g = load_values(base, start, token_stride, tokens)
    return tl.where(g < -100.0, -100.0, g)  # NaN stays


@triton.jit
def decay_between(total, ROW_LATER: tl.constexpr, WITH_DIAGONAL: tl.constexpr):
    """exp(G_i - G_j) of the later token i and the earlier one j, else 0; i is the row if ROW_LATER, or the column."""
    place = tl.arange(0, _N)
    difference = total[:, None] - total[None, :]
    later = place[:, None] - place[None, :]
    if not ROW_LATER:
        difference = -difference
        later = -later
    # Masked before the exponential, which overflows for those in the wrong order.
    least: tl.constexpr = 0 if WITH_DIAGONAL else 1
    return tl.exp(tl.where(later >= least, difference, float("-inf")))


@triton.jit
def state_pointers(base, first_column, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Where BLOCK_V columns of a state are."""
    return base + tl.arange(0, BLOCK_K)[:, None] * V + (first_column + tl.arange(0, BLOCK_V))[None, :]


@triton.jit
def state_mask(first_column, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr):
    """Which elements of `state_pointers` there are."""
    return (tl.arange(0, BLOCK_K) < K)[:, None] & (first_column + tl.arange(0, BLOCK_V) < V)[None, :]


@triton.jit(do_not_specialize=["first_document", "all_final"])
def chunk_scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    skip_ptr,
    to_end_k_ptr,
    decay_ptr,
    products_ptr,
    inverse_ptr,
    initial_ptr,
    spans_ptr,
    o_ptr,
    states_ptr,
    u_ptr,
    final_ptr,
    all_final,
    first_document,
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
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One document, value head and block of columns: o if there is `o_ptr`, else the states and U of its chunks."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    first_column = tl.program_id(0) % BLOCKS * BLOCK_V
    head = (tl.program_id(0) // BLOCKS % HEADS).to(tl.int64)
    document = first_document + (tl.program_id(0) // BLOCKS // HEADS).to(tl.int64)
    span = spans_ptr + document * 6
    first = tl.load(span + _FIRST).to(tl.int64)
    tokens = tl.load(span + _TOKENS)
    first_chunk = tl.load(span + _FIRST_CHUNK).to(tl.int64)
    children = tl.load(span + _CHILDREN)
    k_ptr += first * k_token + head // SHARE * k_head
    v_ptr += first * v_token + head * v_head
    if g_ptr is not None:
        g_ptr += first * g_token + head * g_head
    else:
        to_end_k_ptr += first * k_token + head * k_head
    if beta_ptr is not None:
        beta_ptr += first * beta_token + head * beta_head
    if o_ptr is not None:
        q_ptr += first * q_token + head // SHARE * q_head
        o_ptr += (first * HEADS + head) * V
    if skip_ptr is not None:
        skip = tl.load(skip_ptr + head).to(tl.float32)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    place = tl.arange(0, _N)
    square = place[:, None] * _N + place[None, :]

    # What a document begins with. Kernels are the same whether documents continue others or not, and compiled once.
    mask = state_mask(first_column, K, V, BLOCK_K, BLOCK_V)
    parent = tl.load(span + _PARENT).to(tl.int64)
    start = state_pointers(final_ptr + (parent * HEADS + head) * (K * V), first_column, V, BLOCK_K, BLOCK_V)
    state = tl.load(start, mask=tl.where(mask, parent, -1) >= 0, other=0.0)
    if initial_ptr is not None:
        start = state_pointers(initial_ptr + (document * HEADS + head) * (K * V), first_column, V, BLOCK_K, BLOCK_V)
        state += tl.load(start, mask=tl.where(mask, parent, 0) < 0, other=0.0).to(tl.float32)

    for step in tl.range(0, tl.cdiv(tokens, _N)):
        chunk = first_chunk + step
        begin = (chunk - first_chunk) * _N  # in 64 bits, as it is multiplied by strides
        of_chunk = chunk * HEADS + head
        k = load_tile(k_ptr, begin, k_token, tokens, 0, K, BLOCK_K)
        u = load_tile(v_ptr, begin, v_token, tokens, first_column, V, BLOCK_V).to(tl.float32)
        if g_ptr is not None:
            total = tl.cumsum(load_decays(g_ptr, begin, g_token, tokens), 0)
            last = tl.sum(tl.where(place == _N - 1, total, 0.0), 0)
        low = state.to(dtype)
        if states_ptr is not None:
            out = state_pointers(states_ptr + of_chunk * (K * V), first_column, V, BLOCK_K, BLOCK_V)
            tl.store(out, low, mask=mask)
        if o_ptr is not None and skip_ptr is not None:
            skipped = skip * u
        if inverse_ptr is not None:
            known = tl.dot(k, low, input_precision=PRECISION)
            if g_ptr is not None:
                known *= tl.exp(total)[:, None]
            u -= known
        if beta_ptr is not None:
            u *= load_values(beta_ptr, begin, beta_token, tokens)[:, None]
        if inverse_ptr is not None:
            inverse = tl.load(inverse_ptr + of_chunk * (_N * _N) + square)
            u = tl.dot(inverse, u.to(dtype), input_precision=PRECISION)
            if u_ptr is not None:
                store_tile(u_ptr + of_chunk * (_N * V), u, 0, V, _N, first_column, V, BLOCK_V)
        if o_ptr is not None:
            q = load_tile(q_ptr, begin, q_token, tokens, 0, K, BLOCK_K)
            o = tl.dot(q, low, input_precision=PRECISION)
            if g_ptr is not None:
                products = tl.dot(q, k.T, input_precision=PRECISION) * decay_between(total, True, True)
                o *= tl.exp(total)[:, None]
            else:
                products = tl.load(products_ptr + of_chunk * (_N * _N) + square)
            o = tl.dot(products.to(dtype), u.to(dtype), o, input_precision=PRECISION) * scale
            if skip_ptr is not None:
                o += skipped
            store_tile(o_ptr, o, begin, HEADS * V, tokens, first_column, V, BLOCK_V)
        if g_ptr is not None:
            kept = (u * tl.exp(last - total)[:, None]).to(dtype)
            state = tl.dot(k.T, kept, state * tl.exp(last), input_precision=PRECISION)
        else:
            k = load_tile(to_end_k_ptr, begin, k_token, tokens, 0, K, BLOCK_K)
            state *= load_channels(decay_ptr + of_chunk * K, K, BLOCK_K)[:, None]
            state = tl.dot(k.T, u.to(dtype), state, input_precision=PRECISION)

    if (all_final != 0) | (children > 0):
        out = state_pointers(final_ptr + (document * HEADS + head) * (K * V), first_column, V, BLOCK_K, BLOCK_V)
        tl.store(out, state, mask=mask)


@triton.jit(do_not_specialize=["first_document", "all_first"])
def reverse_scan_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    to_end_k_ptr,
    decay_ptr,
    products_ptr,
    inverse_ptr,
    do_ptr,
    dfinal_ptr,
    spans_ptr,
    dstates_ptr,
    y_ptr,
    dinitial_ptr,
    all_first,
    first_document,
    scale,
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
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One document, value head and block of columns: dS and Y of its chunks, and the gradient of its first state."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    first_column = tl.program_id(0) % BLOCKS * BLOCK_V
    head = (tl.program_id(0) // BLOCKS % HEADS).to(tl.int64)
    document = first_document + (tl.program_id(0) // BLOCKS // HEADS).to(tl.int64)
    span = spans_ptr + document * 6
    first = tl.load(span + _FIRST).to(tl.int64)
    tokens = tl.load(span + _TOKENS)
    first_chunk = tl.load(span + _FIRST_CHUNK).to(tl.int64)
    q_ptr += first * q_token + head // SHARE * q_head
    k_ptr += first * k_token + head // SHARE * k_head
    if g_ptr is not None:
        g_ptr += first * g_token + head * g_head
    else:
        to_end_k_ptr += first * k_token + head * k_head
    do_ptr += first * do_token + head * do_head
    if beta_ptr is not None:
        beta_ptr += first * beta_token + head * beta_head
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    place = tl.arange(0, _N)
    square_transposed = place[:, None] + place[None, :] * _N
    mask = state_mask(first_column, K, V, BLOCK_K, BLOCK_V)

    dstate = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    if dfinal_ptr is not None:
        of_final = state_pointers(dfinal_ptr + (document * HEADS + head) * (K * V), first_column, V, BLOCK_K, BLOCK_V)
        dstate += tl.load(of_final, mask=mask, other=0.0).to(tl.float32)
    first_child = tl.load(span + _FIRST_CHILD).to(tl.int64)
    for child in range(tl.load(span + _CHILDREN)):
        number = (first_child + child) * HEADS + head
        of_child = state_pointers(dinitial_ptr + number * (K * V), first_column, V, BLOCK_K, BLOCK_V)
        dstate += tl.load(of_child, mask=mask, other=0.0)

    chunks = tl.cdiv(tokens, _N)
    for back in tl.range(0, chunks):
        step = chunks - 1 - back
        chunk = first_chunk + step
        begin = (chunk - first_chunk) * _N  # in 64 bits, as it is multiplied by strides
        of_chunk = chunk * HEADS + head
        k = load_tile(k_ptr, begin, k_token, tokens, 0, K, BLOCK_K)
        q = load_tile(q_ptr, begin, q_token, tokens, 0, K, BLOCK_K)
        do = load_tile(do_ptr, begin, do_token, tokens, first_column, V, BLOCK_V)
        low = dstate.to(dtype)
        out = state_pointers(dstates_ptr + of_chunk * (K * V), first_column, V, BLOCK_K, BLOCK_V)
        tl.store(out, low, mask=mask)
        if g_ptr is not None:
            total = tl.cumsum(load_decays(g_ptr, begin, g_token, tokens), 0)
            last = tl.sum(tl.where(place == _N - 1, total, 0.0), 0)
            products = tl.dot(k, q.T, input_precision=PRECISION) * decay_between(total, False, True)
            du = tl.exp(last - total)[:, None] * tl.dot(k, low, input_precision=PRECISION)
            from_start = tl.exp(total)[:, None]
            decay = tl.exp(last)
        else:
            products = tl.load(products_ptr + of_chunk * (_N * _N) + square_transposed).to(tl.float32)
            of_end = load_tile(to_end_k_ptr, begin, k_token, tokens, 0, K, BLOCK_K)
            du = tl.dot(of_end, low, input_precision=PRECISION)
            from_start = tl.full((_N, 1), 1.0, tl.float32)
            decay = load_channels(decay_ptr + of_chunk * K, K, BLOCK_K)[:, None]
        du = tl.dot((products * scale).to(dtype), do, du, input_precision=PRECISION)
        if inverse_ptr is not None:
            inverse = tl.load(inverse_ptr + of_chunk * (_N * _N) + square_transposed)
            du = tl.dot(inverse, du.to(dtype), input_precision=PRECISION)
        store_tile(y_ptr + of_chunk * (_N * V), du, 0, V, _N, first_column, V, BLOCK_V)
        of_q = (do.to(tl.float32) * (scale * from_start)).to(dtype)
        dstate = tl.dot(q.T, of_q, dstate * decay, input_precision=PRECISION)
        if inverse_ptr is not None:
            factor = -from_start * load_values(beta_ptr, begin, beta_token, tokens)[:, None]
            dstate = tl.dot(k.T, (du * factor).to(dtype), dstate, input_precision=PRECISION)

    if (all_first != 0) | (tl.load(span + _PARENT) >= 0):
        out = state_pointers(dinitial_ptr + (document * HEADS + head) * (K * V), first_column, V, BLOCK_K, BLOCK_V)
        tl.store(out, dstate, mask=mask)
