"""Layers that mix tokens by a short convolution alone.

LFM2 has `out_proj(C * conv(B * x))`, with B, C, x projected; Inkling `conv(x) + x` after other projections, which its
second version divides by the root of the number of terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.conv.gated_short_conv import gated_short_conv
from liger_trainer.kernels.conv.short_conv import short_conv
from liger_trainer.kernels.documents import Documents
from liger_trainer.patching.probe import Probe, Proof
from liger_trainer.patching.recurrent.mixers import Compute, conv_weight, is_depthwise, masked
from liger_trainer.patching.recurrent.proof import HIDDEN, key_of, prove, values_of
from liger_trainer.patching.report import Finding, candidate
from liger_trainer.patching.trial import Slack


def find_short_conv(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it is a convolution of each channel, alone or between two projections, else None."""
    children = {name for name, child in module._modules.items() if child is not None}
    if children == {"in_proj", "conv", "out_proj"} and is_depthwise(module.conv):
        prove_it = _prove
    elif children == {"conv1d"} and is_depthwise(module.conv1d) and not module._parameters:
        prove_it = _prove_residual
    else:
        return None
    return candidate(
        "short_conv", module, enabled("short_conv"), lambda: probe.once(key_of(module), prove_it, module, probe)
    )


def _prove(module: nn.Module, probe: Probe) -> Proof:
    conv: Any = module.conv
    taps = conv.kernel_size[0]
    shapes = {"in_proj": (3 * HIDDEN, HIDDEN), "conv": (HIDDEN, 1, taps), "out_proj": (HIDDEN, HIDDEN)}
    candidates = [(f"gated_short_conv ({taps} taps)", _gated_short_conv)]
    what = "another function than C * conv(B * x)"
    return prove(module, probe, lambda: values_of(module, shapes, probe), candidates, what, Slack())


def _gated_short_conv(
    self: Any, hidden_states: torch.Tensor, mask: torch.Tensor | None, documents: Documents
) -> torch.Tensor:
    projected = self.in_proj(masked(hidden_states, mask))
    weight, bias = conv_weight(self.conv, projected.dtype)
    return self.out_proj(gated_short_conv(projected, weight, bias, documents=documents))


def _prove_residual(module: nn.Module, probe: Probe) -> Proof:
    conv: Any = module.conv1d
    taps = conv.kernel_size[0]
    candidates = [
        (f"short_conv ({taps} taps, with residual)", _residual_conv(1.0)),
        (f"short_conv ({taps} taps, with residual, scaled)", _residual_conv((taps + 1) ** -0.5)),
    ]
    draw = functools.partial(values_of, module, {"conv1d": (HIDDEN, 1, taps)}, probe)
    return prove(module, probe, draw, candidates, "another function than conv(x) + x", Slack())


@functools.cache
def _residual_conv(scale: float) -> Compute:
    """What computes `scale * (conv(x) + x)`."""

    def compute(self: Any, x: torch.Tensor, mask: torch.Tensor | None, documents: Documents) -> torch.Tensor:
        weight, bias = conv_weight(self.conv1d, torch.float32)
        if scale != 1.0:  # the operator adds the token itself, and the last tap takes off what is too much
            weight = torch.cat([scale * weight[:, :-1], scale * weight[:, -1:] + (scale - 1.0)], 1)
            bias = None if bias is None else scale * bias
        kept = masked(x, mask)
        y = short_conv(kept, weight, bias, residual=True, documents=documents)
        assert isinstance(y, torch.Tensor)
        return y if mask is None else y + scale * (x - kept)  # padding is hidden from the convolution alone

    return compute
