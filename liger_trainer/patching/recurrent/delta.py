"""Gated delta nets: projections, a short convolution, the gated delta rule, a norm with a gate, a projection.

Models write the projections in three ways: of queries, keys and values in one (Qwen3.5); in one with the gate, whose
channels are those of a key head after the other (Qwen3-Next); and apart (OLMo-hybrid).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.kernels.conv.delta_gates import delta_gates
from liger_trainer.kernels.conv.delta_inputs import delta_inputs
from liger_trainer.kernels.documents import Documents
from liger_trainer.kernels.recurrence.delta_rule import delta_rule
from liger_trainer.patching.as_written import project
from liger_trainer.patching.probe import Probe, Proof, refused
from liger_trainer.patching.recurrent.mixers import Compute, conv_weight, is_depthwise, masked
from liger_trainer.patching.recurrent.proof import HIDDEN, few, key_of, prove, values_of
from liger_trainer.patching.report import Finding, candidate

_HEADS = 2  # of queries and keys, in a proof
_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
_Projected = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values (batch, length, channels), the gate z (batch, length, value channels), and a and b, (batch,
length, value heads)."""


def _split(self: Any, x: torch.Tensor) -> _Projected:
    qkv, z, a, b = project(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_a, self.in_proj_b)
    return qkv, z, a, b


def _by_key_head(self: Any, x: torch.Tensor) -> _Projected:
    ratio = self.num_v_heads // self.num_k_heads
    sizes = [self.head_k_dim, self.head_k_dim, ratio * self.head_v_dim, ratio * self.head_v_dim]
    qkvz, ba = project(x, self.in_proj_qkvz, self.in_proj_ba)
    *qkv, z = qkvz.unflatten(-1, (self.num_k_heads, -1)).split(sizes, -1)
    b, a = ba.unflatten(-1, (self.num_k_heads, -1)).chunk(2, -1)
    return torch.cat([each.flatten(-2) for each in qkv], -1), z.flatten(-2), a.flatten(-2), b.flatten(-2)


def _apart(self: Any, x: torch.Tensor) -> _Projected:
    layers = self.q_proj, self.k_proj, self.v_proj, self.g_proj, self.a_proj, self.b_proj
    q, k, v, g, a, b = project(x, *layers)
    return torch.cat([q, k, v], -1), g, a, b


class _Structure(NamedTuple):
    """One way in which models write the projections."""

    project: Callable[[Any, torch.Tensor], _Projected]
    # By the name of a projection, how many of the channels of queries, of values and of the heads it has.
    widths: dict[str, tuple[int, int, int]]
    norm: str
    out: str


_STRUCTURES = (
    _Structure(
        _split,
        {"in_proj_qkv": (2, 1, 0), "in_proj_z": (0, 1, 0), "in_proj_b": (0, 0, 1), "in_proj_a": (0, 0, 1)},
        "norm",
        "out_proj",
    ),
    _Structure(_by_key_head, {"in_proj_qkvz": (2, 2, 0), "in_proj_ba": (0, 0, 2)}, "norm", "out_proj"),
    _Structure(
        _apart,
        {"q_proj": (1, 0, 0), "k_proj": (1, 0, 0), "v_proj": (0, 1, 0), "g_proj": (0, 1, 0)}
        | {"a_proj": (0, 0, 1), "b_proj": (0, 0, 1)},
        "o_norm",
        "o_proj",
    ),
)


def find_delta_net(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it has the parts of a gated delta net, else None."""
    children = {name for name, child in module._modules.items() if child is not None}
    structure = next((each for each in _STRUCTURES if {*each.widths, each.norm, each.out, "conv1d"} == children), None)
    if structure is None or {*module._parameters} != {"A_log", "dt_bias"}:
        return None
    return candidate(
        "recurrence",
        module,
        enabled("recurrence"),
        lambda: probe.once(key_of(module), _prove, module, structure, probe),
    )


def _prove(module: nn.Module, structure: _Structure, probe: Probe) -> Proof:
    layer: Any = module
    if not all(isinstance(getattr(layer, name, None), int) for name in _SIZES) or not is_depthwise(layer.conv1d):
        return refused("its heads are not named as we know them")
    key_heads, heads, rows, columns = (int(getattr(layer, name)) for name in _SIZES)
    if max(rows, columns) > 256:
        return refused(f"its heads are {rows} by {columns}, and the kernels' at most 256")
    ratio, key_heads = heads // key_heads, few(key_heads, _HEADS, probe)
    heads = ratio * key_heads
    key_width, value_width = key_heads * rows, heads * columns
    shapes: dict[str, tuple[int, ...]] = {
        name: (queries * key_width + values * value_width + numbers * heads, HIDDEN)
        for name, (queries, values, numbers) in structure.widths.items()
    }
    taps = layer.conv1d.kernel_size[0]
    shapes["conv1d"] = (2 * key_width + value_width, 1, taps)
    shapes |= {structure.norm: (columns,), structure.out: (HIDDEN, value_width)}

    def draw() -> dict[str, torch.Tensor]:
        decays = torch.linspace(-4.0, 1.0, heads, device=probe.device)  # from slow ones to what forgets at once
        return {**values_of(module, shapes, probe), "A_log": decays, "dt_bias": probe.randn(heads)}

    candidates = []
    for scale in (1.0, 2.0):
        twice = "" if scale == 1.0 else ", steps up to 2"
        compute = _delta_net(structure.project, structure.norm, structure.out, scale)
        candidates.append((f"delta_rule (one decay a head, {taps} taps{twice})", compute))
    sizes = {"num_k_heads": key_heads, "num_v_heads": heads, "key_dim": key_width, "value_dim": value_width}
    sizes["conv_dim"] = 2 * key_width + value_width
    return prove(module, probe, draw, candidates, "another function than the gated delta rule", sizes=sizes)


@functools.cache
def _delta_net(project: Callable[[Any, torch.Tensor], _Projected], norm: str, out: str, beta_scale: float) -> Compute:
    """What a gated delta net computes, with the names of its norm and its last projection."""

    def compute(
        self: Any, hidden_states: torch.Tensor, mask: torch.Tensor | None, documents: Documents
    ) -> torch.Tensor:
        qkv, z, a, b = project(self, masked(hidden_states, mask))
        q, k, v = delta_inputs(
            qkv,
            conv_weight(self.conv1d, qkv.dtype)[0],
            key_heads=self.num_k_heads,
            value_heads=self.num_v_heads,
            key_dim=self.head_k_dim,
            value_dim=self.head_v_dim,
            documents=documents,
        )
        g, beta = delta_gates(a, b, self.A_log, self.dt_bias, beta_scale=beta_scale)
        o = delta_rule(q, k, v, g, beta, documents=documents)
        assert isinstance(o, torch.Tensor)
        normed = getattr(self, norm)(o.flatten(0, 2), z.reshape(-1, self.head_v_dim))
        return getattr(self, out)(normed.view(*hidden_states.shape[:2], -1))

    return compute
