"""Lightning attention of MiniMax: linear attention with one constant decay a head, a norm, and a gate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.documents import Documents
from liger_trainer.kernels.recurrence.decayed_attention import decayed_attention
from liger_trainer.patching.probe import Probe, Proof, refused
from liger_trainer.patching.recurrent.mixers import masked
from liger_trainer.patching.recurrent.proof import HIDDEN, few, key_of, prove, values_of
from liger_trainer.patching.report import Finding, candidate

_HEADS = 4  # in a proof
_BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


def find_lightning(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it has the parts of a lightning attention, else None."""
    children = {name for name, child in module._modules.items() if child is not None}
    if children != {"qkv_proj", "output_gate", "out_proj", "norm", "act_fn"} or {*module._buffers} != {*_BUFFERS}:
        return None
    return candidate(
        "recurrence", module, enabled("recurrence"), lambda: probe.once(key_of(module), _prove, module, probe)
    )


def _prove(module: nn.Module, probe: Probe) -> Proof:
    layer: Any = module
    sizes = [getattr(layer, name, None) for name in ("num_attention_heads", "head_dim")]
    if not all(isinstance(size, int) for size in sizes) or not hasattr(layer, "decay_factors"):
        return refused("its parts are not named as we know them")
    heads, head_dim = (int(size) for size in sizes if size is not None)
    if head_dim > 256:
        return refused(f"its heads are {head_dim} by {head_dim}, and the kernels' at most 256")
    heads = few(heads, _HEADS, probe)
    inner = heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "qkv_proj": (3 * inner, HIDDEN),
        "output_gate": (inner, HIDDEN),
        "out_proj": (HIDDEN, inner),
        "norm": (inner,),
    }
    slopes = torch.linspace(0.02, 1.0, heads, device=probe.device)[:, None, None].bfloat16().float()
    buffers = dict(zip(_BUFFERS, (slopes, *layer.decay_factors(slopes))))
    what = "another function than attention with constant decays"
    candidates = [("decayed_attention", _lightning)]
    draw = functools.partial(values_of, module, shapes, probe)
    return prove(module, probe, draw, candidates, what, buffers=buffers, sizes={"num_attention_heads": heads})


def _lightning(
    self: Any, hidden_states: torch.Tensor, mask: torch.Tensor | None, documents: Documents
) -> tuple[torch.Tensor, None]:
    qkv = masked(self.act_fn(self.qkv_proj(hidden_states)), mask)
    q, k, v = qkv.unflatten(-1, (self.num_attention_heads, -1)).chunk(3, -1)
    o = decayed_attention(q, k, v, self.slope_rate.flatten(), documents=documents)
    assert isinstance(o, torch.Tensor)
    normed = self.norm(o.flatten(-2))
    return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * normed), None
