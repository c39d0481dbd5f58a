"""Layers that mix tokens by a short convolution alone: `out_proj(C * conv(B * x))` of LFM2, with B, C, x projected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.conv.gated_short_conv import gated_short_conv
from liger_trainer.kernels.documents import Documents
from liger_trainer.patching.probe import Probe, Proof
from liger_trainer.patching.recurrent.mixers import conv_weight, is_depthwise, masked
from liger_trainer.patching.recurrent.proof import HIDDEN, key_of, prove, values_of
from liger_trainer.patching.report import Finding, candidate
from liger_trainer.patching.trial import Slack


def find_short_conv(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if its children are two projections and a convolution of each channel, else None."""
    children = {name for name, child in module._modules.items() if child is not None}
    if children != {"in_proj", "conv", "out_proj"} or not is_depthwise(module.conv):
        return None
    return candidate(
        "short_conv", module, enabled("short_conv"), lambda: probe.once(key_of(module), _prove, module, probe)
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
