"""Attention of whole documents in Triton, for what torch's flash operator lacks: soft-cap, fp32, more than 256 columns.

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

Where queries see selected keys alone, as an indexer has chosen them, the selection is bits (`plan.py`), the same for
all heads. A kernel of its own lists the tiles in which a query has selected a key, for each block of queries and, for
dk and dv, of keys. The others visit the listed tiles, and mask all of them. A list is read as the bounds are computed,
ahead of the loads that depend on it, so these stay in flight, as they would not behind a branch for each tile.

A program computes scores of all D columns and sums COLUMNS columns of a result: the registers do not hold sums of 128
rows of wider heads, which so have several programs, each with the same scores.

Where heads share keys and there are few programs, those of a key head are split over SPLITS programs, whose sums are
added afterwards, in fp32 and in their order.

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
def _program(blocks, HEADS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """The block, first column, head and document of a program: neighbours read the same keys, which then stay in L2."""
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    block = program % blocks
    program = program // blocks
    if PARTS == 1:
        return block, 0, (program % HEADS).to(tl.int64), program // HEADS
    else:  # noqa: RET505 (a compile-time branch)
        first_column = program % PARTS * COLUMNS
        return block, first_column, (program // PARTS % HEADS).to(tl.int64), program // PARTS // HEADS


@triton.jit
def _document(offsets_ptr, key_offsets_ptr, longest, document):
    """The rows of position 0 among the queries and among the keys, the first query's position, and the length.

    Without offsets each document is `longest` tokens. Position 0 has no query where the first query's is another.
    """
    if offsets_ptr is None:
        start = document.to(tl.int64) * longest
        return start, start, 0, longest
    else:  # noqa: RET505
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
def _load_rows(base, rows, stride, length, first, MASKED: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """The (rows, COLUMNS) tile of one head from column `first` on, a multiple of COLUMNS.

    Rows past the document, if MASKED, and columns past D are zero.
    """
    columns = first + tl.arange(0, COLUMNS)
    pointers = base + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=(rows < length)[:, None] & (columns < D)[None, :], other=0.0)
    elif D % COLUMNS:  # noqa: RET505
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _load_part(whole, base, rows, stride, length, first, MASKED: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr):
    """The columns of `whole`, the tile of all columns, that the program sums: `whole` itself, if they are all."""
    if whole.shape[1] == COLUMNS:
        return whole
    else:  # noqa: RET505
        return _load_rows(base, rows, stride, length, first, MASKED, D, COLUMNS)


@triton.jit
def _store_rows(base, tile, rows, stride, length, first, D: tl.constexpr, COLUMNS: tl.constexpr):
    columns = first + tl.arange(0, COLUMNS)
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
def _list_of(tiles_ptr, row, most):
    """Where the list of a block begins, which is `row` of (rows, 1 + most), and how many tiles it has."""
    list_ptr = tiles_ptr + row.to(tl.int64) * (1 + most)
    return list_ptr + 1, tl.load(list_ptr)


@triton.jit
def _first_of(list_ptr, place, origin, SIZE: tl.constexpr):
    """The first position of a tile: `place` itself or, with a list, that of the tile at this place of it."""
    if list_ptr is None:
        return place
    else:  # noqa: RET505
        return origin + tl.load(list_ptr + place) * SIZE


@triton.jit
def _lowest(count):
    """A word with as many bits set, from the lowest on: none below 1, all from 32 on."""
    return tl.where(count >= 32, -1, (1 << (tl.maximum(count, 0) & 31)) - 1)


@triton.jit
def _word(bits_ptr, query, word, start, length, tokens, words, window, WINDOW: tl.constexpr):
    """The selected keys among those of a word that the queries see: none, if the word is behind the last one."""
    pointers = bits_ptr + tl.minimum(word, words - 1).to(tl.int64) * tokens + start + query
    bits = tl.load(pointers, mask=query < length, other=0)
    bits &= _lowest(query - 32 * word + 1)
    if WINDOW:
        bits &= ~_lowest(query - 32 * word - window + 1)
    return bits


@triton.jit
def _selects(
    bits_ptr, query, key, first_key, start, length, tokens, words, window, KEYS: tl.constexpr, WINDOW: tl.constexpr
):
    """Which queries see and have selected which of the KEYS keys from `first_key` on; shapes as for `_sees`.

    What a query does not see is taken from its words, which are far fewer than pairs.
    """
    word = first_key >> 5
    bits = _word(bits_ptr, query, word, start, length, tokens, words, window, WINDOW)
    for more in tl.static_range(1, KEYS // 32):
        later = _word(bits_ptr, query, word + more, start, length, tokens, words, window, WINDOW)
        bits = tl.where(key - first_key >= 32 * more, later, bits)
    return ((bits >> (key & 31)) & 1) != 0


@triton.jit
def _seen(
    bits_ptr, query, key, first_key, start, length, tokens, words, window,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Which queries see which keys: those that they have selected, if SELECTED, or all before them."""
    if SELECTED:
        seen = _selects(bits_ptr, query, key, first_key, start, length, tokens, words, window, KEYS, WINDOW)
    else:
        seen = _sees(query, key, length, window, WINDOW)
    return seen


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
# The tiles in which a query has selected a key
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "words", "longest", "blocks", "window"])
def selected_tiles_kernel(
    bits_ptr,
    tiles_ptr,
    offsets_ptr,
    key_offsets_ptr,
    tokens,
    words,
    longest,
    blocks,
    window,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    BY_KEYS: tl.constexpr,
):
    """The list of one block of queries or, BY_KEYS, of keys: how many tiles, then their numbers, which rise."""
    SHARED: tl.constexpr = key_offsets_ptr is not None
    block, document = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    start, key_start, shift, length = _document(offsets_ptr, key_offsets_ptr, longest, document)
    if BY_KEYS:
        first = block * KEYS
        begin, _, _, end = _queries_of(first, shift, length, window, QUERIES, KEYS, WINDOW, SHARED)
        low, high = (begin - shift) // QUERIES, tl.cdiv(end - shift, QUERIES)
        row, most = key_start // KEYS + document + block, tl.cdiv(longest, QUERIES)
    else:
        first = shift + block * QUERIES
        begin, _, _, end = _keys_of(first, length, window, QUERIES, KEYS, WINDOW)
        low, high = begin // KEYS, tl.cdiv(end, KEYS)
        row, most = (start + shift) // QUERIES + document + block, tl.cdiv(32 * words, KEYS)
    if first >= length:
        return
    list_ptr = tiles_ptr + row.to(tl.int64) * (1 + most)
    count = 0
    for lowest in range(low, high, TILES):
        tile = lowest + tl.arange(0, TILES)
        if BY_KEYS:
            query = shift + tile[:, None] * QUERIES + tl.arange(0, QUERIES)[None, :]
            first_key = first
        else:
            query = first + tl.arange(0, QUERIES)[None, :]
            first_key = tile[:, None] * KEYS
        word = first_key >> 5
        limit = tl.where(tile < high, length, 0)[:, None]
        bits = _word(bits_ptr, query, word, start, limit, tokens, words, window, WINDOW)
        for more in tl.static_range(1, KEYS // 32):
            bits |= _word(bits_ptr, query, word + more, start, limit, tokens, words, window, WINDOW)
        if KEYS < 32:
            bits = (bits >> (first_key & 31)) & ((1 << KEYS) - 1)
        found = tl.max((bits != 0).to(tl.int32), 1)
        tl.store(list_ptr + count + tl.cumsum(found, 0), tile, mask=found != 0)
        count += tl.sum(found, 0)
    tl.store(list_ptr, count)


# ---------------------------------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["tokens", "words", "longest", "blocks", "window"])
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    offsets_ptr,
    key_offsets_ptr,
    bits_ptr,
    tiles_ptr,
    tokens,
    words,
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
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """`out` and `lse` of one block of queries of one head."""
    LN2: tl.constexpr = 0.6931471805599453
    PRECISION: tl.constexpr = "ieee" if PRECISE else None
    SELECTED: tl.constexpr = bits_ptr is not None
    block, first_column, head, document = _program(blocks, HEADS, D, COLUMNS)
    start, key_start, shift, length = _document(offsets_ptr, key_offsets_ptr, longest, document)
    first = shift + (blocks - 1 - block) * QUERIES  # the last blocks have the most keys: they go first
    if first >= length:
        return
    query = first + tl.arange(0, QUERIES)
    q = _load_rows(q_ptr + start * q_token + head * q_head, query, q_token, length, 0, True, D, BLOCK_D)
    k_ptr += key_start * k_token + head // GROUP * k_head
    v_ptr += key_start * v_token + head // GROUP * v_head
    sums = tl.zeros((QUERIES, COLUMNS), tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    peak = tl.full((QUERIES,), float("-inf"), tl.float32)
    begin, whole, edge, end = _keys_of(first, length, window, QUERIES, KEYS, WINDOW)
    if SELECTED:
        row = (start + shift) // QUERIES + document + blocks - 1 - block
        tiles_ptr, end = _list_of(tiles_ptr, row, tl.cdiv(32 * words, KEYS))
        edge = 0
    for part in tl.static_range(2 if SELECTED else 0, 3):
        low, high = _part(part, begin, whole, edge, end)
        for place in range(low, high, 1 if SELECTED else KEYS):
            first_key = _first_of(tiles_ptr, place, 0, KEYS)
            key = first_key + tl.arange(0, KEYS)
            k = _load_rows(k_ptr, key, k_token, length, 0, part != 1, D, BLOCK_D)
            scores, _ = _scores(tl.dot(q, k.T, input_precision=PRECISION), inner, outer, SOFTCAP, PRECISE)
            if part != 1:
                seen = _seen(
                    bits_ptr,
                    query[:, None],
                    key[None, :],
                    first_key,
                    start,
                    length,
                    tokens,
                    words,
                    window,
                    KEYS,
                    WINDOW,
                    SELECTED,
                )
                scores = tl.where(seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            base = new_peak
            if part != 1:
                base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # a query that has seen no key yet
            p = tl.exp2(scores - base[:, None])
            decay = tl.exp2(peak - base)
            total = total * decay + tl.sum(p, 1)
            v = _load_rows(v_ptr, key, v_token, length, first_column, part != 1, D, COLUMNS)
            sums = tl.dot(p.to(v.dtype), v, sums * decay[:, None], input_precision=PRECISION)
            peak = new_peak
    out_ptr += (start * HEADS + head) * D
    _store_rows(out_ptr, sums / total[:, None], query, HEADS * D, length, first_column, D, COLUMNS)
    if first_column == 0:
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
    dout = _load_rows(dout_ptr + head * dout_head, token, dout_token, tokens, 0, True, D, BLOCK_D).to(tl.float32)
    out = _load_rows(out_ptr + head * out_head, token, out_token, tokens, 0, True, D, BLOCK_D).to(tl.float32)
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


@triton.jit(do_not_specialize=["tokens", "words", "keys", "longest", "blocks", "window"])
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
    bits_ptr,
    tiles_ptr,
    tokens,
    words,
    keys,
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
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """The dk and dv, or the one that is not None, of one block of keys of a head. Scores are (KEYS, QUERIES).

    With SPLITS, a program sums over so many parts of the heads that share the keys, into (SPLITS, K, heads, D).
    """
    PRECISION: tl.constexpr = "ieee" if PRECISE else None
    SELECTED: tl.constexpr = bits_ptr is not None
    KEY_HEADS: tl.constexpr = HEADS // GROUP
    MEMBERS: tl.constexpr = GROUP // SPLITS
    block, first_column, part_of_group, document = _program(blocks, KEY_HEADS * SPLITS, D, COLUMNS)
    key_head = part_of_group // SPLITS
    start, key_start, shift, length = _document(offsets_ptr, key_offsets_ptr, longest, document)
    first = block * KEYS
    if first >= length:
        return
    key = first + tl.arange(0, KEYS)
    k = _load_rows(k_ptr + key_start * k_token + key_head * k_head, key, k_token, length, 0, True, D, BLOCK_D)
    if dk_ptr is not None:
        v = _load_rows(v_ptr + key_start * v_token + key_head * v_head, key, v_token, length, 0, True, D, BLOCK_D)
        dk = tl.zeros((KEYS, COLUMNS), tl.float32)
    if dv_ptr is not None:
        dv = tl.zeros((KEYS, COLUMNS), tl.float32)
    SHARED: tl.constexpr = key_offsets_ptr is not None
    begin, whole, edge, end = _queries_of(first, shift, length, window, QUERIES, KEYS, WINDOW, SHARED)
    if SELECTED:
        row = key_start // KEYS + document + block
        tiles_ptr, end = _list_of(tiles_ptr, row, tl.cdiv(longest, QUERIES))
        edge = 0
    for member in range(MEMBERS):
        head = part_of_group * MEMBERS + member
        q_base = q_ptr + start * q_token + head * q_head
        dout_base = dout_ptr + start * dout_token + head * dout_head
        lse_base = lse_ptr + head * tokens + start
        delta_base = delta_ptr + head * tokens + start
        for part in tl.static_range(2 if SELECTED else 0, 3):
            low, high = _part(part, begin, whole, edge, end)
            for place in range(low, high, 1 if SELECTED else QUERIES):
                first_query = _first_of(tiles_ptr, place, shift, QUERIES)
                query = first_query + tl.arange(0, QUERIES)
                q = _load_rows(q_base, query, q_token, length, 0, part != 1, D, BLOCK_D)
                lse, delta = _load_statistics(lse_base, delta_base, query, length, part != 1)
                scores, slope = _scores(tl.dot(k, q.T, input_precision=PRECISION), inner, outer, SOFTCAP, PRECISE)
                p = tl.exp2(scores - lse[None, :])
                if part != 1:
                    seen = _seen(
                        bits_ptr,
                        query[None, :],
                        key[:, None],
                        first,
                        start,
                        length,
                        tokens,
                        words,
                        window,
                        KEYS,
                        WINDOW,
                        SELECTED,
                    )
                    p = tl.where(seen, p, 0.0)
                if dk_ptr is None:
                    dout = _load_rows(dout_base, query, dout_token, length, first_column, part != 1, D, COLUMNS)
                else:
                    dout = _load_rows(dout_base, query, dout_token, length, 0, part != 1, D, BLOCK_D)
                if dv_ptr is not None:
                    dv = tl.dot(p.to(dout.dtype), dout, dv, input_precision=PRECISION)
                if dk_ptr is not None:
                    ds = p * (tl.dot(v, dout.T, input_precision=PRECISION) - delta[None, :])
                    if SOFTCAP:
                        ds *= slope
                    q = _load_part(q, q_base, query, q_token, length, first_column, part != 1, D, COLUMNS)
                    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    offset = ((part_of_group % SPLITS * keys + key_start) * KEY_HEADS + key_head) * D
    if dk_ptr is not None:
        _store_rows(dk_ptr + offset, dk * factor, key, KEY_HEADS * D, length, first_column, D, COLUMNS)
    if dv_ptr is not None:
        _store_rows(dv_ptr + offset, dv, key, KEY_HEADS * D, length, first_column, D, COLUMNS)


@triton.jit(do_not_specialize=["tokens", "words", "longest", "blocks", "window"])
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
    bits_ptr,
    tiles_ptr,
    tokens,
    words,
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
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """The dq of one block of queries of one head."""
    PRECISION: tl.constexpr = "ieee" if PRECISE else None
    SELECTED: tl.constexpr = bits_ptr is not None
    block, first_column, head, document = _program(blocks, HEADS, D, COLUMNS)
    start, key_start, shift, length = _document(offsets_ptr, key_offsets_ptr, longest, document)
    first = shift + (blocks - 1 - block) * QUERIES
    if first >= length:
        return
    query = first + tl.arange(0, QUERIES)
    q = _load_rows(q_ptr + start * q_token + head * q_head, query, q_token, length, 0, True, D, BLOCK_D)
    dout_ptr += start * dout_token + head * dout_head
    dout = _load_rows(dout_ptr, query, dout_token, length, 0, True, D, BLOCK_D)
    statistics = head * tokens + start
    lse, delta = _load_statistics(lse_ptr + statistics, delta_ptr + statistics, query, length, True)
    k_ptr += key_start * k_token + head // GROUP * k_head
    v_ptr += key_start * v_token + head // GROUP * v_head
    dq = tl.zeros((QUERIES, COLUMNS), tl.float32)
    begin, whole, edge, end = _keys_of(first, length, window, QUERIES, KEYS, WINDOW)
    if SELECTED:
        row = (start + shift) // QUERIES + document + blocks - 1 - block
        tiles_ptr, end = _list_of(tiles_ptr, row, tl.cdiv(32 * words, KEYS))
        edge = 0
    for part in tl.static_range(2 if SELECTED else 0, 3):
        low, high = _part(part, begin, whole, edge, end)
        for place in range(low, high, 1 if SELECTED else KEYS):
            first_key = _first_of(tiles_ptr, place, 0, KEYS)
            key = first_key + tl.arange(0, KEYS)
            k = _load_rows(k_ptr, key, k_token, length, 0, part != 1, D, BLOCK_D)
            v = _load_rows(v_ptr, key, v_token, length, 0, part != 1, D, BLOCK_D)
            scores, slope = _scores(tl.dot(q, k.T, input_precision=PRECISION), inner, outer, SOFTCAP, PRECISE)
            p = tl.exp2(scores - lse[:, None])
            if part != 1:
                seen = _seen(
                    bits_ptr,
                    query[:, None],
                    key[None, :],
                    first_key,
                    start,
                    length,
                    tokens,
                    words,
                    window,
                    KEYS,
                    WINDOW,
                    SELECTED,
                )
                p = tl.where(seen, p, 0.0)
            ds = p * (tl.dot(dout, v.T, input_precision=PRECISION) - delta[:, None])
            if SOFTCAP:
                ds *= slope
            k = _load_part(k, k_ptr, key, k_token, length, first_column, part != 1, D, COLUMNS)
            dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    dq_ptr += (start * HEADS + head) * D
    _store_rows(dq_ptr, dq * factor, query, HEADS * D, length, first_column, D, COLUMNS)
