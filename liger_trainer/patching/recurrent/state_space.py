"""Mamba 2: one projection of a gate, x, B, C and time steps, a short convolution of x, B, C, the state space, a norm.

Falcon-H1 multiplies what goes into the projection and what comes out, and may have no norm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.kernels.conv.short_conv import short_conv
from liger_trainer.kernels.documents import Documents
from liger_trainer.kernels.recurrence.state_space import state_space
from liger_trainer.patching.probe import Probe, Proof, refused
from liger_trainer.patching.recurrent.mixers import conv_weight, is_depthwise, masked
from liger_trainer.patching.recurrent.proof import HIDDEN, few, key_of, prove, values_of
from liger_trainer.patching.report import Finding, candidate

_SIZES = ("intermediate_size", "conv_dim", "num_heads", "head_dim", "n_groups", "ssm_state_size")
_GROUPS, _HEADS = 2, 4  # in a proof, and heads of a group
_IN, _OUT = "ssm_in_multiplier", "mup_vector"


def find_state_space(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it has the parts of a Mamba 2 layer, else None; Mamba's has a reason alone."""
    children = {name for name, child in module._modules.items() if child is not None} - {"act"}
    if {"A_log", "D"} <= {*module._parameters} and module._parameters["A_log"].dim() == 2:  # type: ignore[union-attr]
        of_mamba = refused("it has a state with a decay for each channel and state (Mamba)")
        return candidate("recurrence", module, enabled("recurrence"), lambda: of_mamba)
    if children != {"in_proj", "conv1d", "norm", "out_proj"} or {*module._parameters} != {"A_log", "D", "dt_bias"}:
        return None
    return candidate(
        "recurrence", module, enabled("recurrence"), lambda: probe.once(key_of(module), _prove, module, probe)
    )


def _prove(module: nn.Module, probe: Probe) -> Proof:
    layer: Any = module
    if not all(isinstance(getattr(layer, name, None), int) for name in _SIZES) or not is_depthwise(layer.conv1d):
        return refused("its sizes are not named as we know them")
    heads, head_dim, groups, states = (int(getattr(layer, name)) for name in _SIZES[2:])
    named = f"state_space ({groups} group{'s' if groups > 1 else ''})"
    ratio, groups = heads // groups, few(groups, _GROUPS, probe)
    heads = groups * few(ratio, _HEADS, probe)
    sizes = {"n_groups": groups, "num_heads": heads, "intermediate_size": heads * head_dim}
    sizes["group_size"] = heads * head_dim // groups  # of the norm
    sizes["conv_dim"] = channels = heads * head_dim + 2 * groups * states
    inner = heads * head_dim
    if max(head_dim, states) > 256:
        return refused(f"its heads are {states} by {head_dim}, and the kernels' at most 256")
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj": (inner + channels + heads, HIDDEN),
        "conv1d": (channels, 1, layer.conv1d.kernel_size[0]),
        "out_proj": (HIDDEN, inner),
    }
    if not isinstance(layer.norm, nn.Identity):
        shapes["norm"] = (inner,)

    def draw() -> dict[str, torch.Tensor]:
        values = {**values_of(module, shapes, probe), "A_log": torch.linspace(-4.0, 1.0, heads, device=probe.device)}
        values |= {"D": probe.randn(heads), "dt_bias": probe.randn(heads)}
        return values | ({_OUT: 1 + probe.randn(1, 1, inner + channels + heads) / 4} if hasattr(layer, _OUT) else {})

    return prove(module, probe, draw, [(named, _mamba2)], "another function than Mamba 2's", sizes=sizes)


def _mamba2(self: Any, hidden_states: torch.Tensor, mask: torch.Tensor | None, documents: Documents) -> torch.Tensor:
    x = masked(hidden_states, mask)
    if hasattr(self, _IN):
        x = x * self.ssm_in_multiplier
    projected = self.in_proj(x)
    if hasattr(self, _OUT):
        projected = projected * self.mup_vector
    gate, x, steps = projected.split([self.intermediate_size, self.conv_dim, self.num_heads], -1)
    weight, bias = conv_weight(self.conv1d, x.dtype)
    mixed = short_conv(x, weight, bias, activation="silu", documents=documents)
    assert isinstance(mixed, torch.Tensor)
    states = self.n_groups * self.ssm_state_size
    # The bias is at work at padding too.
    x, B, C = masked(mixed, mask).split([self.intermediate_size, states, states], -1)
    y = state_space(
        x.unflatten(-1, (self.num_heads, -1)),
        steps,
        -torch.exp(self.A_log.float()),
        B.unflatten(-1, (self.n_groups, -1)),
        C.unflatten(-1, (self.n_groups, -1)),
        D=self.D,
        dt_bias=self.dt_bias,
        dt_limit=self.time_step_limit,
        documents=documents,
    )
    assert isinstance(y, torch.Tensor)
    y = y.flatten(-2)
    y = y * F.silu(gate) if isinstance(self.norm, nn.Identity) else self.norm(y, gate)
    return self.out_proj(y.to(hidden_states.dtype))
