"""The recurrence of linear attention as an operator; `chunked.py` has the formulas.

Forward, a grid over chunks inverts the matrices of the delta rule, T, and a scan over the chunks of each document
writes o. Backward, the scan runs again for the states S and for U, a scan in reverse writes dS and Y, and a grid over
chunks makes all gradients of them.

With a decay for each channel of the keys, the scans take what `channel_factors.py` makes of the inputs, both times, and
`channel_gradients.py` makes the gradients.

Saved for the backward: the inputs, and T: 128 bytes a token and value head in bf16, as much as its v with 64 columns.
States are not. The backward needs K / 64 + 1 times the memory of v for S and U, and as much for dS and Y.

Shapes: D documents, C chunks of 64 tokens; value heads H, key heads of which each has H / key_heads of them.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.documents import CHUNK, Documents, resolved
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.recurrence import launch
from liger_trainer.kernels.recurrence.channel_launch import channel_factors, channel_gradients
from liger_trainer.kernels.recurrence.chunked import Arguments, chunked_recurrence
from liger_trainer.kernels.runtime import cdiv, has_elements, on_device, reference_of, use_triton


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(batch, tokens, ...) as (T, ...), whose last stride is 1: a view where strides allow it, else a copy."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 or x.dim() == 2 else x.contiguous()


def _inputs(arguments: Arguments, scale: float, delta: bool) -> launch.Inputs:
    q, k, v, g, beta, skip, _ = arguments
    beta = None if beta is None else _flat(beta)
    skip = None if skip is None else skip.contiguous()
    return launch.Inputs(_flat(q), _flat(k), _flat(v), _flat(g), beta, skip, scale, delta)


def _counts(documents: Documents, v: torch.Tensor) -> tuple[int, int, int]:
    """The numbers of documents, of those without a parent, and of chunks."""
    if documents.spans is None or documents.chunks is None:
        return v.shape[0], v.shape[0], v.shape[0] * cdiv(v.shape[1], CHUNK)
    return len(documents.spans), documents.roots, len(documents.chunks)


def _zeros_or_empty(like: torch.Tensor, documents: Documents, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new contiguous tensor, which is 0 where no kernel writes it: at tokens of no document."""
    make = like.new_zeros if documents.padding else like.new_empty
    return make(like.shape, dtype=dtype or like.dtype)


@operator("liger_trainer::recurrence")
def _recurrence(
    arguments: Arguments, documents: Documents, scale: float, delta: bool, final_state: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    v, initial = arguments.v, arguments.initial_state
    number, roots, chunks = _counts(documents, v)
    heads, rows, columns = v.shape[2], arguments.k.shape[3], v.shape[3]
    o = _zeros_or_empty(v, documents)
    final = v.new_empty(number if final_state else 0, heads, rows, columns, dtype=torch.float32)
    inverse = v.new_empty(chunks if delta else 0, heads, CHUNK, CHUNK)
    if has_elements(v):
        inputs, documents = _inputs(arguments, scale, delta), resolved(documents, v)
        initial = None if initial is None else initial.contiguous()
        of_parents = final if final_state else _states_of_parents(inputs, number, roots)
        with on_device(v):
            solve, of_scan = None, inputs
            if arguments.g.dim() == 4:
                solve = v.new_empty(inverse.shape, dtype=torch.float32)
                of_scan, _ = channel_factors(inputs, documents, solve)
            if delta:
                launch.chunk_inverse(inputs, documents, inverse, solve)
            launch.scan(of_scan, inverse if delta else None, initial, documents, of_parents, o=o)
    return o, final, inverse


def _states_of_parents(inputs: launch.Inputs, documents: int, roots: int) -> torch.Tensor:
    """Memory for the last states of documents that others continue; empty if there are none."""
    heads, rows, columns = inputs.v.shape[1], inputs.k.shape[2], inputs.v.shape[2]
    return inputs.v.new_empty(roots if documents > roots else 0, heads, rows, columns, dtype=torch.float32)


@operator("liger_trainer::recurrence_backward")
def _recurrence_backward(
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    arguments: Arguments,
    inverse: torch.Tensor,
    documents: Documents,
    scale: float,
    delta: bool,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v, g, beta, skip, initial = arguments
    number, roots, chunks = _counts(documents, v)
    heads, rows, columns = v.shape[2], k.shape[3], v.shape[3]
    dq, dk, dv = (_zeros_or_empty(x, documents) for x in (q, k, v))
    dg = _zeros_or_empty(g, documents, torch.float32) if needed[3] else v.new_empty(0, dtype=torch.float32)
    dbeta = _zeros_or_empty(beta, documents) if needed[4] and beta is not None else v.new_empty(0)
    dskip = v.new_empty(chunks if needed[5] else 0, heads, dtype=torch.float32)
    first_states = number if number > roots or needed[6] else 0
    dinitial = v.new_empty(first_states, heads, rows, columns, dtype=torch.float32)
    if has_elements(v):
        inputs, documents = _inputs(arguments, scale, delta), resolved(documents, v)
        initial = None if initial is None else initial.contiguous()
        dfinal = None if dfinal is None else dfinal.contiguous()
        do, of_delta = _flat(do), inverse if delta else None
        states, dstates = inputs.empty(chunks, rows, columns), inputs.empty(chunks, rows, columns)
        u, y = inputs.empty(chunks, CHUNK, columns) if delta else None, inputs.empty(chunks, CHUNK, columns)
        out = launch.Gradients(
            dq, dk, dv, dg if needed[3] else None, dbeta if needed[4] else None, dskip if needed[5] else None
        )
        with on_device(v):
            of_parents = _states_of_parents(inputs, number, roots)
            of_scan = inputs
            if g.dim() == 4:
                of_scan, totals = channel_factors(inputs, documents)
            launch.scan(of_scan, of_delta, initial, documents, of_parents, states=states, u=u)
            launch.reverse_scan(of_scan, of_delta, do, dfinal, documents, dstates, y, dinitial, needed[6])
            if u is not None and g.dim() == 4:
                channel_gradients(inputs, totals, do, states, dstates, u, y, documents, out)
            else:
                launch.chunk_gradients(inputs, do, states, dstates, u, y, documents, out)
    dg, dskip, dinitial = (
        x.to(like.dtype) if need and like is not None else v.new_empty(0)
        for need, x, like in (
            (needed[3], dg, g),
            (needed[5], dskip.sum(0), skip),
            (needed[6], dinitial[:roots], initial),
        )
    )
    return dq, dk, dv, dg, dbeta, dskip, dinitial


refuse_second_derivative(_recurrence_backward, "delta_rule, state_space and decayed_attention")


def _setup_context(ctx, inputs, output):
    arguments, documents, ctx.scale, ctx.delta, ctx.final_state = inputs
    ctx.documents = documents._replace(spans=None, chunks=None)
    ctx.save_for_backward(*arguments, output[2], documents.spans, documents.chunks)


def _backward(ctx, do, dfinal, _):
    *tensors, inverse, spans, chunks = ctx.saved_tensors
    arguments, documents = Arguments(*tensors), ctx.documents._replace(spans=spans, chunks=chunks)
    needed = list(ctx.needs_input_grad[:7])
    if do is None:
        do = torch.zeros_like(arguments.v)
    dfinal = dfinal if ctx.final_state else None
    gradients = _recurrence_backward(do, dfinal, arguments, inverse, documents, ctx.scale, ctx.delta, needed)
    return input_gradients(ctx, *where_needed(needed, *gradients))


_recurrence.register_autograd(_backward, setup_context=_setup_context)


def recurrence(
    arguments: Arguments, scale: float, delta: bool, documents: Documents, final_state: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The result, and the final states with `final_state`; arguments and results are those of `chunked_recurrence`."""
    q, k, v, g = arguments[:4]
    dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    fits = launch.takes(k.shape[3], v.shape[3], dtype, v.device, g.dim() == 4) and (delta or g.dim() == 3)
    if v.numel() and fits and all(use_triton(x) for x in arguments if x is not None):
        converted = arguments._replace(q=q.to(dtype), k=k.to(dtype), v=v.to(dtype))
        o, states, _ = _recurrence(converted, documents, scale, delta, final_state)
        o = o.to(v.dtype)
    else:
        with torch.autocast(v.device.type, enabled=False):  # a kernel's products are not cast either
            o, states = chunked_recurrence(arguments, scale, delta, resolved(documents, v))
    return (o, states) if final_state else o


recurrence_reference = reference_of(recurrence, "use_triton")
