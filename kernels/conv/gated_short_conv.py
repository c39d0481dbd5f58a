"""The gated short convolution of LFM2: ``y = C * conv(B * x)``, from one projection that holds B, C and x.

With u = B * x, and du as the gradient of `short_conv` for g = dy * C,

    dB = du * x        dx = du * B        dC = dy * conv(u)

Forward reads the projection and writes y (8 bytes per element of y in bf16); backward reads the projection and dy and
writes the projection's gradient (14 bytes). Saved for backward: the projection alone.

Shapes: bcx (batch, tokens, 3 channels) in the order B, C, x.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.conv.launch import Conv, empty_result, launch_backward, launch_forward, save, saved
from liger_trainer.kernels.conv.short_conv import check_conv_arguments, covered, short_conv_reference
from liger_trainer.kernels.documents import ROWS, Documents, resolved
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import reference_of


@operator("liger_trainer::gated_short_conv")
def _gated_short_conv(
    bcx: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, documents: Documents
) -> torch.Tensor:
    y = empty_result(bcx, len(weight), documents)
    launch_forward(bcx, weight, bias, None, y, documents, Conv(gated=True))
    return y


@operator("liger_trainer::gated_short_conv_backward")
def _gated_short_conv_backward(
    dy: torch.Tensor,
    bcx: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    documents: Documents,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dbcx = empty_result(bcx, bcx.shape[-1], documents)
    parts, needed = [(slice(None), Conv(gated=True))], [*needed[1:], False]
    return dbcx, *launch_backward([dy], bcx, weight, bias, None, dbcx, documents, parts, needed)[:2]


refuse_second_derivative(_gated_short_conv_backward, "gated_short_conv")


def _setup_context(ctx, inputs, output):
    *tensors, documents = inputs
    save(ctx, documents, *tensors)


def _backward(ctx, dy):
    tensors, documents = saved(ctx)
    needed = list(ctx.needs_input_grad[:3])
    gradients = _gated_short_conv_backward(dy, *tensors, documents, needed)
    return input_gradients(ctx, *where_needed(needed, *gradients))


_gated_short_conv.register_autograd(_backward, setup_context=_setup_context)


def gated_short_conv(
    bcx: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, documents: Documents = ROWS
) -> torch.Tensor:
    """A causal convolution of each channel over the tokens of its document, with gates: `C * (conv(B * x) + bias)`.

    Everything is computed in fp32 and rounded once. A document that continues another one begins with its last inputs.

    Args:
        bcx: The projection of shape (batch, tokens, 3 * channels): B, C and x, in any floating dtype.
        weight: Taps of shape (channels, taps), 2 to 8 of them, the last one for the token itself. Any floating dtype.
        bias: Bias of shape (channels,), or None.
        documents: The documents of the batch; by default each row is one.

    Returns:
        Tensor of shape (batch, tokens, channels) in the dtype of `bcx`, 0 for tokens of no document.

    Raises:
        ValueError: If a shape, dtype or device does not fit `bcx`, or there are fewer than 2 taps or more than 8.
    """
    on_triton = check_conv_arguments("gated_short_conv", bcx, weight, bias, bcx.shape[-1] // 3)
    if bcx.shape[-1] % 3:
        raise ValueError(f"`bcx` of gated_short_conv has {bcx.shape[-1]} channels; give 3 for each of the convolution.")
    if on_triton:
        return _gated_short_conv(bcx, weight, bias, documents)
    if documents.padding:  # also where it holds NaN
        bcx = bcx.where(covered(resolved(documents, bcx), bcx), 0.0)
    compute = torch.promote_types(bcx.dtype, torch.float32)
    gate_before, gate_after, x = bcx.to(compute).chunk(3, -1)
    y = short_conv_reference(gate_before * x, weight, bias, documents=documents)
    assert isinstance(y, torch.Tensor)
    return (gate_after * y).to(bcx.dtype)


gated_short_conv_reference = reference_of(gated_short_conv, "check_conv_arguments")
