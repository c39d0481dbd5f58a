"""Short causal convolutions of each channel over the tokens of a document, with bias, activation and residual.

Formula, for one channel of a document with inputs x, taps w (the last one for the token itself), K taps:

    pre[t] = bias + sum over s of w[K - 1 - s] * x[t - s]        y[t] = act(pre[t])  (+ x[t])

and, with g = dy * act'(pre),

    dx[t] = sum over s of w[K - 1 - s] * g[t + s]  (+ dy[t])     dw[K - 1 - s] = sum over t of g[t] * x[t - s]

Shapes: x (batch, tokens, channels).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.conv.sources import last_inputs, sources
from liger_trainer.kernels.documents import ROWS, Documents, resolved
from liger_trainer.kernels.runtime import check_all_dtensors, reference_of, use_triton

MAX_TAPS = 8


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
    check_conv_arguments("short_conv", x, weight, bias)
    documents = resolved(documents, x)
    halo = weight.shape[1] - 1
    if initial_state is not None and initial_state.shape != (documents.roots, halo, x.shape[-1]):
        raise ValueError(
            f"`initial_state` of short_conv has shape {tuple(initial_state.shape)}; give {halo} rows of "
            f"{x.shape[-1]} for each of the {documents.roots} documents without a parent."
        )
    states = 0 if initial_state is None else documents.roots
    rows = x.flatten(0, 1)
    before = [rows.new_zeros(1, x.shape[-1]), *([] if initial_state is None else [initial_state.flatten(0, 1)])]
    inputs = torch.cat([*(each.to(x.dtype) for each in before), rows])
    compute = torch.promote_types(x.dtype, torch.float32)
    table = sources(documents, len(rows), halo, states)
    y = sum(inputs[table[:, tap]].to(compute) * weight[:, tap].to(compute) for tap in range(halo + 1))
    assert isinstance(y, torch.Tensor)
    if bias is not None:
        y = y + bias.to(compute)
    if activation == "silu":
        y = torch.nn.functional.silu(y)
    if residual:
        y = y + rows.to(compute)
    if documents.padding:
        y = y.where(table[:, -1:] > 0, 0.0)
    y = y.to(x.dtype).view_as(x)
    return (y, inputs[last_inputs(documents, halo, states)]) if final_state else y


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
