"""The kernels of short convolutions over documents, which `short_conv.py` and its neighbours launch.

A program takes chunks of a document and a block of channels, and goes through the tokens one by one. The last inputs,
and in the backward the last gradients before the activation, move on in registers, so every input is read once, with
the few tokens around a chunk. A group of rows is loaded before the first of them is used: that keeps enough loads in
flight with few warps.

The backward computes the results before the activation again. At token t it has all terms of dx at t - (taps - 1), and
goes on for as many tokens behind the chunk as are in its document. The last tokens of a parent also get terms from each
child's first tokens, which `_halo_kernel` sums beforehand in fp32, in the order of the children; so does the initial
state from the first tokens of its document. Sums over tokens are one row a program, added up in a fixed order after
that.

Rows may be gated, which is LFM2's convolution: the input of the convolution is B * x, its result is multiplied by C,
and a row holds B, C and x. And heads of HEAD channels may be divided by their length; a block is then whole heads,
each padded to D channels.

Shapes: x and dy (tokens, columns) in rows of any stride; taps w (C, TAPS). Tiles (HEADS, D), of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.documents import CHILDREN, FIRST, FIRST_CHILD, PARENT, TOKENS, Documents, resolved
from liger_trainer.kernels.rows import as_rows, column_sum
from liger_trainer.kernels.runtime import cdiv, has_elements, next_power_of_2, on_device, tl, triton

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
def _forward_kernel(
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
def _halo_kernel(
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
def _backward_kernel(
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


# ---------------------------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------------------------


class Conv(NamedTuple):
    """What kind of convolution a kernel computes."""

    silu: bool = False
    residual: bool = False
    gated: bool = False
    head: int = 0
    """Channels of a head that is divided by its length; 0 for none."""
    eps: float = 0.0

    def options(self, weight: torch.Tensor, block: int) -> dict[str, int | bool]:
        """The constants of a launch with `block` channels a program, or more where a head has more."""
        channels, taps = weight.shape
        lanes = next_power_of_2(self.head) if self.head else block
        heads = max(1, block // lanes)
        head = self.head or block
        return {
            "C": channels,
            "TAPS": taps,
            "SILU": self.silu,
            "GATED": self.gated,
            "NORM": self.head > 0,
            "BLOCKS": cdiv(channels, heads * head),
            "HEADS": heads,
            "HEAD": head,
            "D": lanes,
        }


def empty_result(x: torch.Tensor, channels: int, documents: Documents) -> torch.Tensor:
    """A tensor for the results or gradients of the tokens of `x`: 0 for those of no document, if there are some."""
    shape = (*x.shape[:2], channels)
    return x.new_zeros(shape) if documents.padding else x.new_empty(shape)


def save(ctx: Any, documents: Documents, *tensors: torch.Tensor | None) -> None:
    """Saves these and the tables of the documents for a backward, which asks for them by `saved`."""
    ctx.save_for_backward(documents.spans, documents.chunks, *tensors)
    ctx.documents = documents._replace(spans=None, chunks=None)


def saved(ctx: Any) -> tuple[list[torch.Tensor | None], Documents]:
    """The tensors and the documents that `save` was given."""
    spans, chunks, *tensors = ctx.saved_tensors
    return tensors, ctx.documents._replace(spans=spans, chunks=chunks)


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    y: torch.Tensor,
    documents: Documents,
    conv: Conv,
) -> None:
    """Writes the results of the documents' tokens to `y`.

    Args:
        x: (batch, tokens, columns).
        weight: (channels, taps).
        bias: (channels,), or None.
        state: (documents without a parent, taps - 1, channels), or None.
        y: Contiguous (batch, tokens, channels).
        documents: The documents.
        conv: The kind of convolution.
    """
    if not has_elements(x):
        return
    documents, rows = resolved(documents, x), as_rows(x, None)
    assert documents.chunks is not None
    block, group, num_warps = forward_tile()
    options = conv.options(weight, block)
    with on_device(x):
        _forward_kernel[(len(documents.chunks) * options["BLOCKS"],)](
            rows,
            *map(_contiguous, (weight, bias, state)),
            y,
            documents.spans,
            documents.chunks,
            rows.stride(0),
            conv.eps,
            RESIDUAL=conv.residual,
            GROUP=group,
            num_warps=num_warps,
            **options,
        )


def launch_backward(
    dys: Sequence[torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    dx: torch.Tensor,
    documents: Documents,
    parts: Sequence[tuple[slice, Conv]],
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes the gradients of the documents' tokens to `dx`, and returns those of taps, bias and initial states.

    Args:
        dys: For each part (batch, tokens, channels of the part).
        x: What the forward was given, as are the three arguments after it.
        weight: Taps.
        bias: Bias, of one part that is all channels.
        state: Initial states, also of such a part.
        dx: Contiguous, of the shape of `x`.
        documents: The documents.
        parts: Channels, and the kind of convolution that they have. A gated one is a part with all of them.
        needed: Whether the gradients that are returned are needed. One that is not has no elements.
    """
    of_weight, of_bias, of_state = (
        each if each is not None and need else None for each, need in zip((weight, bias, state), needed)
    )
    dweight = x.new_empty(0) if of_weight is None else weight.new_empty(weight.shape)
    dbias = x.new_empty(0) if of_bias is None else of_bias.new_empty(of_bias.shape)
    dstate = x.new_empty(0) if of_state is None else of_state.new_empty(of_state.shape)
    if not has_elements(x):
        return dweight.zero_(), dbias.zero_(), dstate.zero_()
    documents, rows, dx_rows = resolved(documents, x), as_rows(x, None), dx.flatten(0, 1)
    assert documents.spans is not None
    assert documents.chunks is not None
    channels, taps = weight.shape
    block, group, num_warps, num_chunks = backward_tile(parts[0][1])
    programs = cdiv(len(documents.chunks), num_chunks)

    def sums(*shape: int) -> torch.Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    partial = None if of_weight is None and of_bias is None else sums(taps + (bias is not None), programs, channels)
    before = None if of_state is None else sums(documents.roots, taps - 1, channels)
    taps_by_channel, *others = map(_contiguous, (weight, bias, state))
    with on_device(x):
        for dy, (part, conv) in zip(dys, parts):
            part_taps = taps_by_channel[part]
            options = conv.options(part_taps, block)
            dy_rows, x_part, dx_part = as_rows(dy, None), rows[:, part], dx_rows[:, part]
            given = dy_rows, x_part, part_taps, *others
            tail = None
            if len(documents.spans) > documents.roots:
                tail = sums(documents.roots, taps - 1, dy_rows.shape[1])
            if tail is not None or before is not None:
                _halo_kernel[(documents.roots * options["BLOCKS"],)](
                    *given,
                    tail,
                    before,
                    documents.spans,
                    dy_rows.stride(0),
                    rows.stride(0),
                    conv.eps,
                    num_warps=num_warps,
                    **options,
                )
            _backward_kernel[(programs * options["BLOCKS"],)](
                *given,
                tail,
                dx_part,
                None if partial is None else partial[..., part],
                documents.spans,
                documents.chunks,
                dy_rows.stride(0),
                rows.stride(0),
                dx_rows.stride(0),
                channels,
                len(documents.chunks),
                conv.eps,
                RESIDUAL=conv.residual,
                GROUP=group,
                CHUNKS=num_chunks,
                num_warps=num_warps,
                **options,
            )
        if partial is not None and of_weight is not None:
            column_sum(partial[None, :taps], by_tap := of_weight.new_empty(taps, channels))
            dweight.copy_(by_tap.T)
        if partial is not None and of_bias is not None:
            column_sum(partial[taps:], dbias)
    if before is not None:
        dstate.copy_(before)
    return dweight, dbias, dstate


def _contiguous(tensor: Any) -> Any:
    return None if tensor is None else tensor.contiguous()


def forward_tile() -> tuple[int, int, int]:
    """Channels of a program, tokens of a group and warps.

    4 channels a thread, loaded in 8 bytes, leave room for twice as many warps as 8 do, which is faster. Measured on an
    H200.
    """
    return 128, 4, 1


def backward_tile(conv: Conv) -> tuple[int, int, int, int]:
    """Channels of a program, tokens of a group, warps and chunks of a program. Measured on an H200."""
    return 128, 4 if conv.gated or conv.head else 8, 1, 2
