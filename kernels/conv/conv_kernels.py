"""The kernels of short convolutions over documents, which `launch.py` launches.

A program takes chunks of a document and a block of channels, and goes through the tokens one by one. The last inputs,
and in the backward the last gradients before the activation, move on in registers, so every input is read once, with
the few tokens around a chunk. A group of rows is loaded before the first of them is used: that keeps enough loads in
flight with few warps.

The backward computes the results before the activation again. At token t it has all terms of dx at t - (taps - 1), and
goes on for as many tokens behind the chunk as are in its document. The last tokens of a parent also get terms from each
child's first tokens, which `halo_kernel` sums beforehand in fp32, in the order of the children; so does the initial
state from the first tokens of its document. Sums over tokens are one row a program, added up in a fixed order after
that.

Rows may be gated, which is LFM2's convolution: the input of the convolution is B * x, its result is multiplied by C,
and a row holds B, C and x. And heads of HEAD channels may be divided by their length; a block is then whole heads,
each padded to D channels.

Shapes: x and dy (tokens, columns) in rows of any stride; taps w (C, TAPS). Tiles (HEADS, D), of channels.
"""

from __future__ import annotations

from liger_trainer.kernels.documents import CHILDREN, FIRST, FIRST_CHILD, PARENT, TOKENS
from liger_trainer.kernels.runtime import tl, triton

_FIRST, _TOKENS, _PARENT = tl.constexpr(FIRST), tl.constexpr(TOKENS), tl.constexpr(PARENT)
_FIRST_CHILD, _CHILDREN = tl.constexpr(FIRST_CHILD), tl.constexpr(CHILDREN)


@triton.jit
def _and(values, value):
    """The tuple `values` with one more."""
    return values + (value,)  # noqa: RUF005


@triton.jit
def _zeros(columns, COUNT: tl.constexpr):
    """So many tiles of zeros."""
    zeros = ()
    for _ in tl.static_range(COUNT):
        zeros = _and(zeros, tl.zeros(columns.shape, tl.float32))
    return zeros


@triton.jit
def _columns(block, HEADS: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr):
    """The channels of a block, and their places in a padded head, both (HEADS, D)."""
    lane = tl.broadcast_to(tl.arange(0, D)[None, :], (HEADS, D))
    return (block * HEADS + tl.arange(0, HEADS))[:, None] * HEAD + lane, lane


@triton.jit
def _mask(columns, lane, valid, C: tl.constexpr, HEAD: tl.constexpr, D: tl.constexpr):
    """Which channels of a row exist: none where the scalar `valid` is False."""
    mask = columns < tl.where(valid, C, 0)
    if HEAD < D:
        mask = mask & (lane < HEAD)
    return mask


@triton.jit
def _row(ptr, place, stride, columns, mask):
    return tl.load(ptr + place * stride + columns, mask=mask, other=0.0)


@triton.jit
def _input_row(x_ptr, place, stride, columns, mask, C: tl.constexpr, GATED: tl.constexpr):
    """A row of the convolution's input."""
    row = _row(x_ptr, place, stride, columns + (2 * C if GATED else 0), mask)
    if GATED:
        row = row.to(tl.float32) * _row(x_ptr, place, stride, columns, mask).to(tl.float32)
    return row


@triton.jit
def _inputs_before(
    x_ptr,
    state_ptr,
    spans_ptr,
    document,
    position,
    x_stride,
    columns,
    lane,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    GATED: tl.constexpr,
):
    """The TAPS - 1 inputs before a position of a document, the oldest first, in fp32."""
    span_ptr = spans_ptr + document * 6
    parent = tl.load(span_ptr + _PARENT)
    continues = parent >= 0
    holder = tl.where(continues, parent, document)  # of what is before the document
    first = tl.load(span_ptr + _FIRST)
    end_of_parent = tl.load(spans_ptr + holder * 6 + _FIRST) + tl.load(spans_ptr + holder * 6 + _TOKENS)
    tokens_before = tl.where(continues, tl.load(spans_ptr + holder * 6 + _TOKENS), 0)
    window = ()
    for tap in tl.static_range(TAPS - 1):
        at = position + (tap - TAPS + 1)
        place = (tl.where(at >= 0, first, end_of_parent) + at).to(tl.int64)
        mask = _mask(columns, lane, at + tokens_before >= 0, C, HEAD, D)
        row = _input_row(x_ptr, place, x_stride, columns, mask, C, GATED).to(tl.float32)
        if state_ptr is not None:
            state_row = (holder * (TAPS - 1) + (TAPS - 1) + at + tokens_before).to(tl.int64)
            mask = _mask(columns, lane, at + tokens_before < 0, C, HEAD, D)
            row += _row(state_ptr, state_row, C, columns, mask).to(tl.float32)
        window = _and(window, row)
    return window


@triton.jit
def _parameters(
    weight_ptr,
    bias_ptr,
    columns,
    lane,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
):
    """The taps of each channel, the oldest token's first, and the bias, in fp32."""
    mask = _mask(columns, lane, True, C, HEAD, D)
    weights = ()
    for tap in tl.static_range(TAPS):
        weights = _and(weights, tl.load(weight_ptr + columns * TAPS + tap, mask=mask, other=0.0).to(tl.float32))
    bias = tl.zeros(columns.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return weights, bias


@triton.jit
def _convolved(window, weights, bias, TAPS: tl.constexpr):
    pre = bias
    for tap in tl.static_range(TAPS):
        pre += window[tap] * weights[tap]
    return pre


@triton.jit
def _correlated(window, weights, TAPS: tl.constexpr):
    """The gradient of an input: the oldest gradient of the window is that of the same token."""
    dx = window[0] * weights[TAPS - 1]
    for step in tl.static_range(1, TAPS):
        dx += window[step] * weights[TAPS - 1 - step]
    return dx


@triton.jit
def _sigmoid(z):
    """1 / (1 + exp(-z)): half of the instructions, as each of these functions is one."""
    root = tl.rsqrt(1.0 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def _of_length_one(u, eps):
    """Rows of `u` divided by their length, and 1 / the length."""
    inverse = tl.rsqrt(tl.sum(u * u, axis=1, keep_dims=True) + eps)
    return u * inverse, inverse


@triton.jit
def _before_activation(pre, dy, eps, SILU: tl.constexpr, NORM: tl.constexpr):
    """The gradient of `pre`, given that of the result."""
    if SILU:
        sigmoid = _sigmoid(pre)
        if NORM:
            unit, inverse = _of_length_one(pre * sigmoid, eps)
            dy = inverse * (dy - unit * tl.sum(dy * unit, axis=1, keep_dims=True))
        dy *= sigmoid * (1.0 + pre * (1.0 - sigmoid))
    return dy


@triton.jit
def forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    y_ptr,
    spans_ptr,
    chunks_ptr,
    x_stride,
    eps,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A block of channels of the results of one chunk."""
    columns, lane = _columns(tl.program_id(0) % BLOCKS, HEADS, HEAD, D)
    chunk_ptr = chunks_ptr + (tl.program_id(0) // BLOCKS) * 3
    document, first, tokens = tl.load(chunk_ptr), tl.load(chunk_ptr + 1), tl.load(chunk_ptr + 2)
    position = first - tl.load(spans_ptr + document * 6 + _FIRST)
    weights, bias = _parameters(weight_ptr, bias_ptr, columns, lane, C, TAPS, HEAD, D)
    window = _inputs_before(
        x_ptr, state_ptr, spans_ptr, document, position, x_stride, columns, lane, C, TAPS, HEAD, D, GATED
    )
    x_ptr += first.to(tl.int64) * x_stride
    y_ptr += first.to(tl.int64) * C
    for start in range(0, tokens, GROUP):
        rows = ()
        gates = ()
        for i in tl.static_range(GROUP):
            mask = _mask(columns, lane, start + i < tokens, C, HEAD, D)
            rows = _and(rows, _input_row(x_ptr, start + i, x_stride, columns, mask, C, GATED))
            if GATED:
                gates = _and(gates, _row(x_ptr, start + i, x_stride, columns + C, mask))
        for i in tl.static_range(GROUP):
            window = _and(window, rows[i].to(tl.float32))
            y = _convolved(window, weights, bias, TAPS)
            if SILU:
                y *= _sigmoid(y)
            if NORM:
                y, _ = _of_length_one(y, eps)
            if RESIDUAL:
                y += window[TAPS - 1]
            if GATED:
                y *= gates[i].to(tl.float32)
            window = window[1:]
            mask = _mask(columns, lane, start + i < tokens, C, HEAD, D)
            tl.store(y_ptr + (start + i) * C + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _terms_of_first_tokens(
    dy_ptr,
    x_ptr,
    state_ptr,
    spans_ptr,
    document,
    dy_stride,
    x_stride,
    eps,
    weights,
    bias,
    columns,
    lane,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
):
    """What the first tokens of a document add to the gradients of the TAPS - 1 inputs before it, the oldest first."""
    window = _inputs_before(x_ptr, state_ptr, spans_ptr, document, 0, x_stride, columns, lane, C, TAPS, HEAD, D, GATED)
    first, tokens = tl.load(spans_ptr + document * 6 + _FIRST), tl.load(spans_ptr + document * 6 + _TOKENS)
    x_ptr += first.to(tl.int64) * x_stride
    dy_ptr += first.to(tl.int64) * dy_stride
    gradients = _zeros(columns, TAPS - 1)
    terms = ()
    for i in tl.static_range(TAPS - 1):
        mask = _mask(columns, lane, i < tokens, C, HEAD, D)
        window = _and(window, _input_row(x_ptr, i, x_stride, columns, mask, C, GATED).to(tl.float32))
        dy = _row(dy_ptr, i, dy_stride, columns, mask).to(tl.float32)
        if GATED:
            dy *= _row(x_ptr, i, x_stride, columns + C, mask).to(tl.float32)
        g = _before_activation(_convolved(window, weights, bias, TAPS), dy, eps, SILU, NORM)
        gradients = _and(gradients, tl.where(i < tokens, g, 0.0))
        terms = _and(terms, _correlated(gradients, weights, TAPS))
        window = window[1:]
        gradients = gradients[1:]
    return terms


@triton.jit
def halo_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    tail_ptr,
    dstate_ptr,
    spans_ptr,
    dy_stride,
    x_stride,
    eps,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
):
    """For a document without a parent: the sum of its children's terms, and the gradient of its initial state."""
    columns, lane = _columns(tl.program_id(0) % BLOCKS, HEADS, HEAD, D)
    document = tl.program_id(0) // BLOCKS
    weights, bias = _parameters(weight_ptr, bias_ptr, columns, lane, C, TAPS, HEAD, D)
    out = document.to(tl.int64) * ((TAPS - 1) * C) + columns
    total = _zeros(columns, TAPS - 1)
    child = tl.load(spans_ptr + document * 6 + _FIRST_CHILD)
    for each in range(child, child + tl.load(spans_ptr + document * 6 + _CHILDREN)):
        terms = _terms_of_first_tokens(
            *(dy_ptr, x_ptr, state_ptr, spans_ptr, each, dy_stride, x_stride, eps, weights, bias, columns, lane),
            *(C, TAPS, SILU, GATED, NORM, HEAD, D),
        )
        added = ()
        for i in tl.static_range(TAPS - 1):
            added = _and(added, total[i] + terms[i])
        total = added
    mask = _mask(columns, lane, True, C, HEAD, D)
    if tail_ptr is not None:
        for i in tl.static_range(TAPS - 1):
            tl.store(tail_ptr + out + i * C, total[i], mask=mask)
    if dstate_ptr is not None:
        terms = _terms_of_first_tokens(
            *(dy_ptr, x_ptr, state_ptr, spans_ptr, document, dy_stride, x_stride, eps, weights, bias, columns, lane),
            *(C, TAPS, SILU, GATED, NORM, HEAD, D),
        )
        for i in tl.static_range(TAPS - 1):
            tl.store(dstate_ptr + out + i * C, terms[i], mask=mask)
        # A child of a shorter document reads its initial state too.
        tokens = tl.load(spans_ptr + document * 6 + _TOKENS)
        for i in tl.static_range(TAPS - 1):
            mask = _mask(columns, lane, tokens + i < TAPS - 1, C, HEAD, D)
            place = dstate_ptr + out + (tokens + i) * C
            tl.store(place, tl.load(place, mask=mask, other=0.0) + total[i], mask=mask)


@triton.jit
def _store_dx(
    dx_ptr,
    dy_ptr,
    x_ptr,
    tail_ptr,
    dx,
    at,
    tail,
    dx_stride,
    dy_stride,
    x_stride,
    columns,
    lane,
    tokens,
    in_tail,
    C: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
):
    """Stores the gradient of one of a chunk's tokens, with what its children and a residual add to it."""
    exists = (at >= 0) & (at < tokens)
    mask = _mask(columns, lane, exists, C, HEAD, D)
    if RESIDUAL:
        dx += _row(dy_ptr, at, dy_stride, columns, mask).to(tl.float32)
    if tail_ptr is not None:
        dx += _row(tail_ptr, tail.to(tl.int64), C, columns, _mask(columns, lane, exists & in_tail, C, HEAD, D))
    out = dx_ptr + at * dx_stride + columns
    if GATED:
        before = _row(x_ptr, at, x_stride, columns, mask).to(tl.float32)
        x = _row(x_ptr, at, x_stride, columns + 2 * C, mask).to(tl.float32)
        tl.store(out + 2 * C, (dx * before).to(dx_ptr.dtype.element_ty), mask=mask)
        dx *= x
    tl.store(out, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_chunks"])
def backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    state_ptr,
    tail_ptr,
    dx_ptr,
    partial_ptr,
    spans_ptr,
    chunks_ptr,
    dy_stride,
    x_stride,
    dx_stride,
    partial_stride,
    num_chunks,
    eps,
    C: tl.constexpr,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    NORM: tl.constexpr,
    BLOCKS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """A block of channels of dx of CHUNKS chunks, and this program's share of the gradients of taps and bias."""
    HALO: tl.constexpr = TAPS - 1
    SUMS: tl.constexpr = TAPS if bias_ptr is None else TAPS + 1
    columns, lane = _columns(tl.program_id(0) % BLOCKS, HEADS, HEAD, D)
    program = tl.program_id(0) // BLOCKS
    weights, bias = _parameters(weight_ptr, bias_ptr, columns, lane, C, TAPS, HEAD, D)
    sums = _zeros(columns, SUMS)
    for chunk in range(program * CHUNKS, tl.minimum(program * CHUNKS + CHUNKS, num_chunks)):
        document = tl.load(chunks_ptr + chunk * 3)
        first, tokens = tl.load(chunks_ptr + chunk * 3 + 1), tl.load(chunks_ptr + chunk * 3 + 2)
        position = first - tl.load(spans_ptr + document * 6 + _FIRST)
        after = tl.load(spans_ptr + document * 6 + _TOKENS) - position  # tokens of the document from here on
        first_of_tail = after - HALO
        if tail_ptr is not None:
            first_of_tail = tl.where(tl.load(spans_ptr + document * 6 + _CHILDREN) > 0, first_of_tail, after)
        first_tail = document * HALO - (after - HALO)
        window = _inputs_before(
            x_ptr, state_ptr, spans_ptr, document, position, x_stride, columns, lane, C, TAPS, HEAD, D, GATED
        )
        x_chunk_ptr = x_ptr + first.to(tl.int64) * x_stride
        dy_chunk_ptr = dy_ptr + first.to(tl.int64) * dy_stride
        dx_chunk_ptr = dx_ptr + first.to(tl.int64) * dx_stride
        gradients = _zeros(columns, HALO)
        for start in range(0, tokens, GROUP):
            rows = ()
            dys = ()
            for i in tl.static_range(GROUP):
                mask = _mask(columns, lane, start + i < tokens, C, HEAD, D)
                rows = _and(rows, _input_row(x_chunk_ptr, start + i, x_stride, columns, mask, C, GATED))
                dys = _and(dys, _row(dy_chunk_ptr, start + i, dy_stride, columns, mask))
            for i in tl.static_range(GROUP):
                place = start + i
                mask = _mask(columns, lane, start + i < tokens, C, HEAD, D)
                window = _and(window, rows[i].to(tl.float32))
                dy = dys[i].to(tl.float32)
                pre = _convolved(window, weights, bias, TAPS)
                if GATED:
                    out = dx_chunk_ptr + place * dx_stride + columns + C
                    tl.store(out, (dy * pre).to(dx_ptr.dtype.element_ty), mask=mask)
                    dy *= _row(x_chunk_ptr, place, x_stride, columns + C, mask).to(tl.float32)
                g = _before_activation(pre, dy, eps, SILU, NORM)
                gradients = _and(gradients, g)
                if partial_ptr is not None:
                    added = ()
                    for tap in tl.static_range(TAPS):
                        added = _and(added, sums[tap] + g * window[tap])
                    if SUMS > TAPS:
                        added = _and(added, sums[TAPS] + g)
                    sums = added
                at = start + i - HALO  # whose gradient is complete
                dx = _correlated(gradients, weights, TAPS)
                _store_dx(
                    *(dx_chunk_ptr, dy_chunk_ptr, x_chunk_ptr, tail_ptr, dx, at, first_tail + at),
                    *(dx_stride, dy_stride, x_stride, columns, lane, tokens, at >= first_of_tail),
                    *(C, RESIDUAL, GATED, HEAD, D),
                )
                window = window[1:]
                gradients = gradients[1:]
        # The last tokens need the gradients of those behind the chunk. Only a full chunk has some in its document.
        end = tl.cdiv(tokens, GROUP) * GROUP
        for i in tl.static_range(HALO):
            place = end + i
            mask = _mask(columns, lane, end + i < after, C, HEAD, D)
            window = _and(window, _input_row(x_chunk_ptr, place, x_stride, columns, mask, C, GATED).to(tl.float32))
            dy = _row(dy_chunk_ptr, place, dy_stride, columns, mask).to(tl.float32)
            if GATED:
                dy *= _row(x_chunk_ptr, place, x_stride, columns + C, mask).to(tl.float32)
            g = _before_activation(_convolved(window, weights, bias, TAPS), dy, eps, SILU, NORM)
            gradients = _and(gradients, tl.where(end + i < after, g, 0.0))
            at = end + i - HALO
            dx = _correlated(gradients, weights, TAPS)
            _store_dx(
                *(dx_chunk_ptr, dy_chunk_ptr, x_chunk_ptr, tail_ptr, dx, at, first_tail + at),
                *(dx_stride, dy_stride, x_stride, columns, lane, tokens, at >= first_of_tail),
                *(C, RESIDUAL, GATED, HEAD, D),
            )
            window = window[1:]
            gradients = gradients[1:]
    if partial_ptr is not None:
        mask = _mask(columns, lane, True, C, HEAD, D)
        for i in tl.static_range(SUMS):
            row = i * (tl.num_programs(0) // BLOCKS) + program
            tl.store(partial_ptr + row.to(tl.int64) * partial_stride + columns, sums[i], mask=mask)
