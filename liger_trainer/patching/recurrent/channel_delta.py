"""Delta attention of Kimi Linear and Bailing: a gated delta net with a decay for each channel of the keys.

A child of the layer, which is called, gives the decays: models bound them in ways of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.conv.delta_inputs import delta_inputs
from liger_trainer.kernels.documents import Documents
from liger_trainer.kernels.recurrence.delta_rule import delta_rule
from liger_trainer.patching.as_written import project
from liger_trainer.patching.probe import Probe, Proof, full_shape, refused
from liger_trainer.patching.recurrent.mixers import conv_weight, is_depthwise, masked
from liger_trainer.patching.recurrent.proof import HIDDEN, few, key_of, prove, values_of
from liger_trainer.patching.report import Finding, candidate

_PARTS = {"q_proj", "k_proj", "v_proj", "b_proj", "conv1d", "forget_gate", "o_norm", "o_proj"}
_HEADS = 2  # in a proof
_GATES: tuple[set[str], ...] = ({"g_proj"}, {"g_a_proj", "g_b_proj"})


def find_channel_delta(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it has the parts of a delta attention with decays by channel, else None."""
    children = {name for name, child in module._modules.items() if child is not None}
    if children - _PARTS not in _GATES or not children >= _PARTS or module._parameters:
        return None
    return candidate(
        "recurrence", module, enabled("recurrence"), lambda: probe.once(key_of(module), _prove, module, probe)
    )


def _prove(module: nn.Module, probe: Probe) -> Proof:
    layer: Any = module
    sizes = [getattr(layer, name, None) for name in ("num_heads", "head_dim")]
    if not all(isinstance(size, int) for size in sizes) or not is_depthwise(layer.conv1d):
        return refused("its heads are not named as we know them")
    heads, head_dim = (int(size) for size in sizes if size is not None)
    if head_dim > 256:
        return refused(f"its heads are {head_dim} by {head_dim}, and the kernels' at most 256")
    heads = few(heads, _HEADS, probe)
    inner = heads * head_dim
    taps = layer.conv1d.kernel_size[0]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (inner, HIDDEN))
    shapes |= {"b_proj": (heads, HIDDEN), "conv1d": (3 * inner, 1, taps), "o_proj": (HIDDEN, inner)}
    shapes["o_norm"] = (head_dim,)
    shapes |= _chain("g_", inner, head_dim, layer)
    gate = layer.forget_gate
    shapes |= {f"forget_gate.{name}": shape for name, shape in _chain("f_", inner, head_dim, gate).items()}
    if {*gate._parameters} != {"A_log", "dt_bias"}:
        return refused("its decays are not of the kind that we know")

    shape = [heads if size > 1 else 1 for size in full_shape(gate.A_log)]

    def draw() -> dict[str, torch.Tensor]:
        decays = torch.linspace(-4.0, 1.0, heads, device=probe.device).view(shape)
        own = {"forget_gate.A_log": decays, "forget_gate.dt_bias": probe.randn(inner)}
        return {**values_of(module, shapes, probe), **own}

    candidates = [(f"delta_rule (a decay for each channel, {taps} taps)", _channel_delta)]
    what = "another function than the delta rule with decays by channel"
    return prove(module, probe, draw, candidates, what, sizes={"num_heads": heads, "qkv_dim": inner})


def _chain(prefix: str, inner: int, between: int, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of one projection to `inner` channels, or of two, with `between` channels after the first."""
    if f"{prefix}proj" in module._modules:
        return {f"{prefix}proj": (inner, HIDDEN)}
    return {f"{prefix}a_proj": (between, HIDDEN), f"{prefix}b_proj": (inner, between)}


def _channel_delta(
    self: Any, hidden_states: torch.Tensor, mask: torch.Tensor | None, documents: Documents
) -> torch.Tensor:
    x = masked(hidden_states, mask)
    gate_proj = self.g_proj if "g_proj" in self._modules else self.g_a_proj
    *qkv, beta, gate = project(x, self.q_proj, self.k_proj, self.v_proj, self.b_proj, gate_proj)
    weight, _ = conv_weight(self.conv1d, beta.dtype)
    heads = {"key_heads": self.num_heads, "value_heads": self.num_heads}
    dims = {"key_dim": self.head_dim, "value_dim": self.head_dim}
    q, k, v = delta_inputs(torch.cat(qkv, -1), weight, **heads, **dims, documents=documents)
    o = delta_rule(q, k, v, self.forget_gate(x), beta.sigmoid(), documents=documents)
    assert isinstance(o, torch.Tensor)
    gate = gate if "g_proj" in self._modules else self.g_b_proj(gate)
    return self.o_proj(self.o_norm(o, gate.view_as(o)).flatten(-2))
