"""Attention of whole documents in Triton, forward and backward, for what torch's flash operator lacks: soft-cap, fp32.

For a query i of a document, its head, and the keys j that it sees (FlashAttention-2, arXiv 2307.08691)::

    s_ij = scale * q_i . k_j                         or, with a soft-cap c,  c * tanh(scale * q_i . k_j / c)
    lse_i = log(sum over j of exp(s_ij))             out_i = sum over j of p_ij v_j,  p_ij = exp(s_ij - lse_i)

and, for the gradient dout of the result,

    delta_i = dout_i . out_i                         dv_j = sum over i of p_ij dout_i
    ds_ij = p_ij (dout_i . v_j - delta_i) t_ij       dq_i = scale * sum over j of ds_ij k_j
    t_ij = 1, or 1 - (s_ij / c)**2 with a soft-cap   dk_j = scale * sum over i of ds_ij q_i

The backward uses `out` and `lse` only as they are given to it. Further keys that share the softmax (a sink, a prefix)
may therefore be merged into both between the two, and the gradients are those of the merged softmax.

Neither s nor p is ever in memory. The forward keeps a running maximum and sum of each query; everything is in base 2,
because the exponential of base 2 is one instruction: log2(e) is part of the factors of `transform_logits`. Saved for
the backward: q, k, v, out and lse. The backward computes s and p again, twice: once for a block of keys, whose dk and
dv are summed over the queries and over the heads that share the keys, and once for a block of queries and its dq. So
every gradient has one writer, which sums in a fixed order in fp32: no atomics, and every run gives the same bits.

A document may have more keys than queries, before its own those of tokens of other documents, as a completion that
sees its prompt: its queries are then at the last positions.

A block of queries visits the blocks of keys in three parts: those at the far edge of the window, where some pairs are
masked; those that all of its queries see whole, without a mask; those on the diagonal or at the end of the document.

Shapes: T tokens and K keys of all documents, D head_dim; tiles are QUERIES by KEYS of one head.
"""

from __future__ import annotations

from liger_trainer.kernels.activation import tanh_and_derivative
from liger_trainer.kernels.head.logit_rows import transform_logits
from liger_trainer.kernels.runtime import tl, triton

# ---------------------------------------------------------------------------------------------------------------------
# What the kernels share. Positions are those of a document's keys, int32; offsets of elements are int64. Strides of
# tokens are constants: a program's addresses then differ by constants, and take a register instead of many.
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit
def _program(blocks, HEADS: tl.constexpr):
    """The block, head and document of a program: neighbours read the same keys, which then stay in L2."""
    program = tl.program_id(0)
    return program % blocks, (program // blocks % HEADS).to(tl.int64), program // blocks // HEADS


@triton.jit
def _document(offsets_ptr, key_offsets_ptr, longest, document):
    """The rows of position 0 among the queries and among the keys, the first query's position, and the length.

    Without offsets each document is `longest` tokens. Position 0 has no query where the first query's is another.
    """
    if offsets_ptr is None:
        start = document.to(tl.int64) * longest
        return start, start, 0, longest
    else:  # noqa: RET505 (a compile-time branch)
        start = tl.load(offsets_ptr + document)
        length = tl.load(offsets_ptr + document + 1) - start
        if key_offsets_ptr is None:
            return start.to(tl.int64), start.to(tl.int64), 0, length
        else:  # noqa: RET505
            key_start = tl.load(key_offsets_ptr + document)
            keys = tl.load(key_offsets_ptr + document + 1) - key_start
            shift = keys - length
            return (start - shift).to(tl.int64), key_start.to(tl.int64), shift, keys


@triton.jit
def _load_rows(base, rows, stride, length, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The (rows, BLOCK_D) tile of one head. Rows past the document, if MASKED, and columns past D are zero."""
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=(rows < length)[:, None] & (columns < D)[None, :], other=0.0)
    elif D < BLOCK_D:  # noqa: RET505
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _store_rows(base, tile, rows, stride, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    columns = tl.arange(0, BLOCK_D)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    mask = (rows < length)[:, None] & (columns < D)[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _scores(products, inner, outer, SOFTCAP: tl.constexpr, PRECISE: tl.constexpr):
    """log2(e) * s of the products q . k, and t / 4 with a soft-cap.

    `transform_logits` computes tanh with an absolute error of fp32, which is small against the rounding of p to half
    precision; fp32 (PRECISE) needs it relative.
    """
    HALF_LN2: tl.constexpr = 0.34657359027997264
    if SOFTCAP and PRECISE:
        tanh, derivative = tanh_and_derivative(products * (inner * HALF_LN2))
        return outer * tanh, 0.25 * derivative
    else:  # noqa: RET505
        return transform_logits(products, inner, outer, SOFTCAP)


@triton.jit
def _sees(query, key, length, window, WINDOW: tl.constexpr):
    """Which queries see which keys; one is a row of positions and the other a column."""
    seen = (query < length) & (key < length) & (key <= query)
    if WINDOW:
        seen = seen & (key > query - window)
    return seen


@triton.jit
def _keys_of(first, length, window, QUERIES: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr):
    """The keys of QUERIES queries: where they begin, where blocks that all see whole begin and end, where they end."""
    begin = 0
    whole = 0
    edge = (first + 1) // KEYS * KEYS
    end = tl.minimum(first + QUERIES, length)
    if WINDOW:
        begin = tl.maximum(first + 1 - window, 0) // KEYS * KEYS
        whole = tl.minimum(tl.cdiv(tl.maximum(first + QUERIES - window, 0), KEYS) * KEYS, end)
        edge = tl.maximum(edge, whole)
    return begin, whole, edge, end


@triton.jit
def _queries_of(
    first,
    shift,
    length,
    window,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SHARED: tl.constexpr,
):
    """The queries of KEYS keys, as `_keys_of`; the first query is at position `shift`."""
    first -= shift
    length -= shift
    edge = length // QUERIES * QUERIES
    end = length
    if WINDOW:
        edge = tl.minimum(edge, (first + window) // QUERIES * QUERIES)
        end = tl.minimum(first + KEYS - 1 + window, length)
    begin = first // QUERIES * QUERIES
    whole = tl.minimum(tl.cdiv(first + KEYS - 1, QUERIES) * QUERIES, end)
    if SHARED:  # the keys may be before the first query, even too far for its window
        begin = tl.maximum(begin, 0)
        whole = tl.maximum(whole, 0)
    edge = tl.maximum(edge, whole)
    return shift + begin, shift + whole, shift + edge, shift + end


@triton.jit
def _part(part: tl.constexpr, begin, whole, edge, end):
    """The bounds of one of the three parts; part 1 needs no mask."""
    if part == 0:
        return begin, whole
    elif part == 1:  # noqa: RET505
        return whole, edge
    else:
        return edge, end


# ---------------------------------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "longest", "blocks", "window"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    offsets_ptr,
    key_offsets_ptr,
    tokens,
    longest,
    blocks,
    window,
    inner,
    outer,
    q_token: tl.constexpr,
    q_head,
    k_token: tl.constexpr,
    k_head,
    v_token: tl.constexpr,
    v_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """`out` and `lse` of one block of queries of one head."""
    LN2: tl.constexpr = 0.6931471805599453
    PRECISION: tl.constexpr = "ieee" if PRECISE else None
    block, head, document = _program(blocks, HEADS)
    start, key_start, shift, length = _document(offsets_ptr, key_offsets_ptr, longest, document)
    first = shift + (blocks - 1 - block) * QUERIES  # the last blocks have the most keys: they go first
    if first >= length:
        return
    query = first + tl.arange(0, QUERIES)
    q = _load_rows(q_ptr + start * q_token + head * q_head, query, q_token, length, True, D, BLOCK_D)
    k_ptr += key_start * k_token + head // GROUP * k_head
    v_ptr += key_start * v_token + head // GROUP * v_head
    sums = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    begin, whole, edge, end = _keys_of(first, length, window, QUERIES, KEYS, WINDOW)
    for part in tl.static_range(3):
        low, high = _part(part, begin, whole, edge, end)
        for first_key in range(low, high, KEYS):
            key = first_key + tl.arange(0, KEYS)
            k = _load_rows(k_ptr, key, k_token, length, part != 1, D, BLOCK_D)
            scores, _ = _scores(tl.dot(q, k.T, input_precision=PRECISION), inner, outer, SOFTCAP, PRECISE)
            if part != 1:
                seen = _sees(query[:, None], key[None, :], length, window, WINDOW)
                scores = tl.where(seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            base = new_peak
            if part != 1:
                base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a query that has seen no key yet
            p = tl.exp2(scores - base[:, None])
            decay = tl.exp2(peak - base)
            total = total * decay + tl.sum(p, 1)
            v = _load_rows(v_ptr, key, v_token, length, part != 1, D, BLOCK_D)
            sums = tl.dot(p.to(v.dtype), v, sums * decay[:, None], input_precision=PRECISION)
            peak = new_peak
    out_ptr += (start * HEADS + head) * D
    _store_rows(out_ptr, sums / total[:, None], query, HEADS * D, length, D, BLOCK_D)
    tl.store(lse_ptr + head * tokens + start + query, (peak + tl.log2(total)) * LN2, mask=query < length)


# ---------------------------------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "blocks"])
def delta_kernel(
    dout_ptr,
    out_ptr,
    delta_ptr,
    tokens,
    blocks,
    dout_token: tl.constexpr,
    dout_head,
    out_token: tl.constexpr,
    out_head,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The delta of ROWS tokens of one head."""
    head = (tl.program_id(0) // blocks).to(tl.int64)
    token = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    dout = _load_rows(dout_ptr + head * dout_head, token, dout_token, tokens, True, D, BLOCK_D).to(tl.float32)
    out = _load_rows(out_ptr + head * out_head, token, out_token, tokens, True, D, BLOCK_D).to(tl.float32)
    tl.store(delta_ptr + head * tokens + token, tl.sum(dout * out, 1), mask=token < tokens)


@triton.jit
def _load_statistics(lse_ptr, delta_ptr, query, length, MASKED: tl.constexpr):
    """log2(e) * lse and delta of some queries."""
    LOG2E: tl.constexpr = 1.4426950408889634
    if MASKED:
        lse = tl.load(lse_ptr + query, mask=query < length, other=0.0)
        return lse * LOG2E, tl.load(delta_ptr + query, mask=query < length, other=0.0)
    else:  # noqa: RET505
        return tl.load(lse_ptr + query) * LOG2E, tl.load(delta_ptr + query)


@triton.jit(do_not_specialize=["tokens", "longest", "blocks", "window"])
def key_gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    offsets_ptr,
    key_offsets_ptr,
    tokens,
    longest,
    blocks,
    window,
    inner,
    outer,
    factor,
    q_token: tl.constexpr,
    q_head,
    k_token: tl.constexpr,
    k_head,
    v_token: tl.constexpr,
    v_head,
    dout_token: tl.constexpr,
    dout_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """The dk and dv, or the one that is not None, of one block of keys of a head. Scores are (KEYS, QUERIES)."""
    PRECISION: tl.constexpr = "ieee" if PRECISE else None
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    block, key_head, document = _program(blocks, KEY_HEADS)
    start, key_start, shift, length = _document(offsets_ptr, key_offsets_ptr, longest, document)
    first = block * KEYS
    if first >= length:
        return
    key = first + tl.arange(0, KEYS)
    k = _load_rows(k_ptr + key_start * k_token + key_head * k_head, key, k_token, length, True, D, BLOCK_D)
    if dk_ptr is not None:
        v = _load_rows(v_ptr + key_start * v_token + key_head * v_head, key, v_token, length, True, D, BLOCK_D)
        dk = tl.zeros((KEYS, BLOCK_D), tl.float32)
    if dv_ptr is not None:
        dv = tl.zeros((KEYS, BLOCK_D), tl.float32)
    SHARED: tl.constexpr = key_offsets_ptr is not None
    begin, whole, edge, end = _queries_of(first, shift, length, window, QUERIES, KEYS, WINDOW, SHARED)
    for member in range(GROUP):
        head = key_head * GROUP + member
        q_base = q_ptr + start * q_token + head * q_head
        dout_base = dout_ptr + start * dout_token + head * dout_head
        lse_base = lse_ptr + head * tokens + start
        delta_base = delta_ptr + head * tokens + start
        for part in tl.static_range(3):
            low, high = _part(part, begin, whole, edge, end)
            for first_query in range(low, high, QUERIES):
                query = first_query + tl.arange(0, QUERIES)
                q = _load_rows(q_base, query, q_token, length, part != 1, D, BLOCK_D)
                lse, delta = _load_statistics(lse_base, delta_base, query, length, part != 1)
                scores, slope = _scores(tl.dot(k, q.T, input_precision=PRECISION), inner, outer, SOFTCAP, PRECISE)
                p = tl.exp2(scores - lse[None, :])
                if part != 1:
                    p = tl.where(_sees(query[None, :], key[:, None], length, window, WINDOW), p, 0.0)
                dout = _load_rows(dout_base, query, dout_token, length, part != 1, D, BLOCK_D)
                if dv_ptr is not None:
                    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
                if dk_ptr is not None:
                    ds = p * (tl.dot(v, dout.T, input_precision=PRECISION) - delta[None, :])
                    if SOFTCAP:
                        ds *= slope
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    offset = (key_start * KEY_HEADS + key_head) * D
    if dk_ptr is not None:
        _store_rows(dk_ptr + offset, dk * factor, key, KEY_HEADS * D, length, D, BLOCK_D)
    if dv_ptr is not None:
        _store_rows(dv_ptr + offset, dv, key, KEY_HEADS * D, length, D, BLOCK_D)


@triton.jit(do_not_specialize=["tokens", "longest", "blocks", "window"])
def query_gradients_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    offsets_ptr,
    key_offsets_ptr,
    tokens,
    longest,
    blocks,
    window,
    inner,
    outer,
    factor,
    q_token: tl.constexpr,
    q_head,
    k_token: tl.constexpr,
    k_head,
    v_token: tl.constexpr,
    v_head,
    dout_token: tl.constexpr,
    dout_head,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """The dq of one block of queries of one head."""
    PRECISION: tl.constexpr = "ieee" if PRECISE else None
    block, head, document = _program(blocks, HEADS)
    start, key_start, shift, length = _document(offsets_ptr, key_offsets_ptr, longest, document)
    first = shift + (blocks - 1 - block) * QUERIES
    if first >= length:
        return
    query = first + tl.arange(0, QUERIES)
    q = _load_rows(q_ptr + start * q_token + head * q_head, query, q_token, length, True, D, BLOCK_D)
    dout_ptr += start * dout_token + head * dout_head
    dout = _load_rows(dout_ptr, query, dout_token, length, True, D, BLOCK_D)
    statistics = head * tokens + start
    lse, delta = _load_statistics(lse_ptr + statistics, delta_ptr + statistics, query, length, True)
    k_ptr += key_start * k_token + head // GROUP * k_head
    v_ptr += key_start * v_token + head // GROUP * v_head
    dq = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    begin, whole, edge, end = _keys_of(first, length, window, QUERIES, KEYS, WINDOW)
    for part in tl.static_range(3):
        low, high = _part(part, begin, whole, edge, end)
        for first_key in range(low, high, KEYS):
            key = first_key + tl.arange(0, KEYS)
            k = _load_rows(k_ptr, key, k_token, length, part != 1, D, BLOCK_D)
            v = _load_rows(v_ptr, key, v_token, length, part != 1, D, BLOCK_D)
            scores, slope = _scores(tl.dot(q, k.T, input_precision=PRECISION), inner, outer, SOFTCAP, PRECISE)
            p = tl.exp2(scores - lse[:, None])
            if part != 1:
                p = tl.where(_sees(query[:, None], key[None, :], length, window, WINDOW), p, 0.0)
            ds = p * (tl.dot(dout, v.T, input_precision=PRECISION) - delta[:, None])
            if SOFTCAP:
                ds *= slope
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    _store_rows(dq_ptr + (start * HEADS + head) * D, dq * factor, query, HEADS * D, length, D, BLOCK_D)
