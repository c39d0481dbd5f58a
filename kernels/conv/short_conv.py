"""Short causal convolutions of each channel over the tokens of a document, with bias, activation and residual.

Formula, for one channel of a document with inputs x, taps w (the last one for the token itself), K taps:

    pre[t] = bias + sum over s of w[K - 1 - s] * x[t - s]        y[t] = act(pre[t])  (+ x[t])

and, with g = dy * act'(pre),

    dx[t] = sum over s of w[K - 1 - s] * g[t + s]  (+ dy[t])     dw[K - 1 - s] = sum over t of g[t] * x[t - s]

Forward reads x and writes y (4 bytes per element in bf16); backward reads x and dy and writes dx (6 bytes). Saved for
backward: x alone, as pre is computed again.

Shapes: x (batch, tokens, channels).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.conv.launch import Conv, empty_result, launch_backward, launch_forward, save, saved
from liger_trainer.kernels.documents import CHUNK, FIRST, PARENT, ROWS, TOKENS, Documents, resolved
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import check_all_dtensors, reference_of, use_triton

MAX_TAPS = 8


@operator("liger_trainer::short_conv")
def _short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    documents: Documents,
    silu: bool,
    residual: bool,
) -> torch.Tensor:
    y = empty_result(x, x.shape[-1], documents)
    launch_forward(x, weight, bias, state, y, documents, Conv(silu, residual))
    return y


@operator("liger_trainer::short_conv_backward")
def _short_conv_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor | None,
    documents: Documents,
    silu: bool,
    residual: bool,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = empty_result(x, x.shape[-1], documents)
    parts = [(slice(None), Conv(silu, residual))]
    return dx, *launch_backward([dy], x, weight, bias, state, dx, documents, parts, needed[1:])


refuse_second_derivative(_short_conv_backward, "short_conv")


def _setup_context(ctx, inputs, output):
    *tensors, documents, ctx.silu, ctx.residual = inputs
    save(ctx, documents, *tensors)


def _backward(ctx, dy):
    tensors, documents = saved(ctx)
    needed = list(ctx.needs_input_grad[:4])
    gradients = _short_conv_backward(dy, *tensors, documents, ctx.silu, ctx.residual, needed)
    return input_gradients(ctx, *where_needed(needed, *gradients))


_short_conv.register_autograd(_backward, setup_context=_setup_context)


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    residual: bool = False,
    documents: Documents = ROWS,
    initial_state: torch.Tensor | None = None,
    final_state: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """A causal convolution of each channel over the tokens of its document: `act(conv(x) + bias)`.

    Everything is computed in fp32 and rounded once. A document that continues another one begins with its last inputs.

    Args:
        x: Input of shape (batch, tokens, channels) and any floating dtype. It may be a part of a projection.
        weight: Taps of shape (channels, taps), 2 to 8 of them, the last one for the token itself. Any floating dtype.
        bias: Bias of shape (channels,), or None.
        activation: None or ``"silu"``.
        residual: Whether `x` is added to the result.
        documents: The documents of the batch; by default each row is one.
        initial_state: The inputs before the first token of each document that continues none, of shape (documents
            without a parent, taps - 1, channels). Zeros by default.
        final_state: Whether the last inputs of each document are returned as well.

    Returns:
        Tensor of the shape and dtype of `x`, 0 for tokens of no document. With `final_state` also the last inputs of
        each document, (documents, taps - 1, channels), in the order of the documents and the dtype of `x`.

    Raises:
        ValueError: If a shape, dtype or device does not fit `x`, there are fewer than 2 taps or more than 8, or
            `activation` is unknown.
    """
    if activation not in (None, "silu"):
        raise ValueError(f'`activation` of short_conv is {activation!r}; it must be None or "silu".')
    on_triton = check_conv_arguments("short_conv", x, weight, bias)
    halo, roots = weight.shape[1] - 1, x.shape[0] if documents.spans is None else documents.roots
    if initial_state is not None and initial_state.shape != (roots, halo, x.shape[-1]):
        raise ValueError(
            f"`initial_state` of short_conv has shape {tuple(initial_state.shape)}; give {halo} rows of "
            f"{x.shape[-1]} for each of the {roots} documents without a parent."
        )
    if initial_state is not None and (not initial_state.is_floating_point() or initial_state.device != x.device):
        raise ValueError(
            f"`initial_state` of short_conv has dtype {initial_state.dtype} and is on {initial_state.device}; give "
            f"a floating point tensor on {x.device}."
        )
    on_triton = on_triton and (initial_state is None or use_triton(initial_state))
    if on_triton:
        y = _short_conv(x, weight, bias, initial_state, documents, activation == "silu", residual)
        if not final_state:
            return y
    tables, states, rows = resolved(documents, x), 0 if initial_state is None else roots, x.flatten(0, 1)
    before = [rows.new_zeros(1, x.shape[-1]), *([] if initial_state is None else [initial_state.flatten(0, 1)])]
    inputs = torch.cat([*(each.to(x.dtype) for each in before), rows])
    if not on_triton:
        taps = weight.to(torch.promote_types(x.dtype, torch.float32))
        wide = inputs.to(taps.dtype)  # so that the terms of a gradient are rounded once, when they are added
        table = _sources(tables, len(rows), halo, states)
        y = wide[table[:, 0]] * taps[:, 0]
        for tap in range(1, halo + 1):
            y = y + wide[table[:, tap]] * taps[:, tap]
        if bias is not None:
            y = y + bias.to(taps.dtype)
        if activation == "silu":
            y = torch.nn.functional.silu(y)
        if residual:
            y = y + wide[len(wide) - len(rows) :]
        if documents.padding:
            y = y.where(table[:, -1:] > 0, 0.0)
        y = y.to(x.dtype).view_as(x)
    return (y, inputs[_last_inputs(tables, halo, states)]) if final_state else y


def check_conv_arguments(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, columns: int | None = None
) -> bool:
    """Checks the input and the parameters of a convolution.

    Args:
        name: The public function.
        x: The input, whose name is `x` but where `columns` is given.
        weight: The taps.
        bias: The bias.
        columns: Channels of the convolution; those of `x` by default.

    Returns:
        Whether it runs as a Triton kernel.

    Raises:
        ValueError: If `x` is not a floating point tensor of shape (batch, tokens, channels), or a parameter does not
            fit its channels, its device or its kind of tensor.
    """
    if x.dim() != 3 or not x.is_floating_point():
        raise ValueError(
            f"The input of {name} has shape {tuple(x.shape)} and dtype {x.dtype}; give a floating point tensor of "
            "shape (batch, tokens, channels)."
        )
    columns = x.shape[-1] if columns is None else columns
    if weight.dim() != 2 or weight.shape[0] != columns or not 2 <= weight.shape[1] <= MAX_TAPS:
        raise ValueError(
            f"`weight` of {name} has shape {tuple(weight.shape)}; give ({columns}, taps) with 2 to {MAX_TAPS} taps, "
            "such as `conv1d.weight.squeeze(1)`."
        )
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"`bias` of {name} has shape {tuple(bias.shape)}; give ({columns},), or None.")
    check_all_dtensors(name, x, weight=weight, bias=bias)
    for argument, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        if not parameter.is_floating_point():
            raise ValueError(f"`{argument}` of {name} has dtype {parameter.dtype}; give a floating point tensor.")
        if parameter.device != x.device:
            raise ValueError(
                f"`{argument}` of {name} is on {parameter.device}, but its input is on {x.device}; move one to the "
                "other."
            )
    return all(use_triton(each) for each in (x, weight, bias) if each is not None)


short_conv_reference = reference_of(short_conv, "check_conv_arguments")

# Tables for plain torch of the inputs that taps read. The tap of step s of a token reads the input s tokens before it
# in its document. Before a document's first token are the last inputs of its parent; before the first token of a
# document without a parent is its initial state, or zeros. Inputs are numbered: 0 is a row of zeros, then come the rows
# of the initial states, then the tokens of the flattened batch. `halo` is the number of taps less one.


def _sources(documents: Documents, tokens: int, halo: int, states: int) -> torch.Tensor:
    """The numbers of the inputs of each token, int64 (tokens, halo + 1), the token itself last.

    Args:
        documents: The documents, with tables.
        tokens: Tokens of the flattened batch. Those of no document read zeros alone.
        halo: How many tokens back the first tap reads.
        states: How many documents have an initial state: all without a parent, or 0.
    """
    assert documents.spans is not None
    assert documents.chunks is not None
    document, first, size = documents.chunks.long()[..., None].unbind(1)
    slot = torch.arange(CHUNK, device=first.device)
    place = torch.where(slot < size, first + slot, tokens)  # the last row of the table, for what no chunk has
    position = first + slot - documents.spans.long()[document, FIRST]
    steps = torch.arange(halo, -1, -1, device=first.device)
    table = first.new_zeros(tokens + 1, halo + 1)
    table[place] = _input_numbers(documents, document[..., None], position[..., None] - steps, halo, states)
    table[tokens] = 0
    return table[:tokens]


def covered(documents: Documents, x: torch.Tensor) -> torch.Tensor:
    """Which tokens of `x`, (batch, tokens, channels), belong to a document: bool (batch, tokens, 1)."""
    return (_sources(documents, x.shape[0] * x.shape[1], 0, 0) > 0).view(*x.shape[:2], 1)


def _last_inputs(documents: Documents, halo: int, states: int) -> torch.Tensor:
    """The numbers of the last inputs of each document, int64 (documents, halo), those before its first included."""
    assert documents.spans is not None
    document = torch.arange(len(documents.spans), device=documents.spans.device)[:, None]
    steps = torch.arange(halo, 0, -1, device=documents.spans.device)
    return _input_numbers(documents, document, documents.spans.long()[document, TOKENS] - steps, halo, states)


def _input_numbers(
    documents: Documents, document: torch.Tensor, position: torch.Tensor, halo: int, states: int
) -> torch.Tensor:
    """The numbers of the inputs at positions of documents, from -halo on."""
    assert documents.spans is not None
    spans = documents.spans.long()
    parent = spans[document, PARENT]
    continued = (position < 0) & (parent >= 0)
    holder = torch.where(continued, parent, document)
    position = torch.where(continued, position + spans[holder, TOKENS], position)
    of_token = 1 + states * halo + spans[holder, FIRST] + position
    of_state = 1 + holder * halo + halo + position if states else torch.zeros_like(of_token)
    return torch.where(position >= 0, of_token, of_state)
