"""The gated short convolution of LFM2: ``y = C * conv(B * x)``, from one projection that holds B, C and x.

Shapes: bcx (batch, tokens, 3 channels) in the order B, C, x.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.conv.short_conv import check_conv_arguments, short_conv_reference
from liger_trainer.kernels.documents import ROWS, Documents
from liger_trainer.kernels.runtime import reference_of


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
    check_conv_arguments("gated_short_conv", bcx, weight, bias, bcx.shape[-1] // 3)
    if bcx.shape[-1] % 3:
        raise ValueError(f"`bcx` of gated_short_conv has {bcx.shape[-1]} channels; give 3 for each of the convolution.")
    compute = torch.promote_types(bcx.dtype, torch.float32)
    gate_before, gate_after, x = bcx.to(compute).chunk(3, -1)
    y = short_conv_reference(gate_before * x, weight, bias, documents=documents)
    assert isinstance(y, torch.Tensor)
    return (gate_after * y).to(bcx.dtype)


gated_short_conv_reference = reference_of(gated_short_conv, "check_conv_arguments")
