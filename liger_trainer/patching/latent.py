"""Latent attention (MLA of DeepSeek-V2, and of all that took it over): what surrounds its projections.

Such an attention has a method of its own, `expand_kv`, that makes keys and values out of latents and a key that all
heads share. It is compared with ours on a dummy of the module, and where they agree, ours is bound to the instance in
its place (`kernels/attention/latent.py`). The up-projection is called as before, so adapters and hooks stay.

Where the rotary function of such an attention is proved too, its queries are rotated as a whole (`last_columns.py`).
The forward stays the class's own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.rebound import forward_calling
from liger_trainer.kernels.attention.latent import expand_keys
from liger_trainer.patching.as_written import EVERY_PRECISION, Precisions, runs_ours
from liger_trainer.patching.binding import bind_method
from liger_trainer.patching.inputs import LATENTS, ROTATION
from liger_trainer.patching.last_columns import LastColumns
from liger_trainer.patching.probe import Probe, Proof, class_of, dummy_module, projection, refused
from liger_trainer.patching.report import SWITCHED_OFF, Finding, proved
from liger_trainer.patching.rope import rotary_globals
from liger_trainer.patching.rotations import arguments_of
from liger_trainer.patching.trial import Agreement

_METHOD = "expand_kv"
_SIZES = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_KERNEL, _WITH_QUERIES = "expand_keys", "expand_keys, whole queries rotated"
_BATCH, _LENGTH, _HEADS, _RANK = 2, 5, 3, 16


def find_latent(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Iterator[Finding]:
    """The finding for `module`, if it is a latent attention; it may have one for its rotary function beside it."""
    names = _projections(module)
    sizes = tuple(getattr(module, name, None) for name in _SIZES)
    if len(names) != 1 or not all(type(size) is int and size > 0 for size in sizes):
        return
    target, (name,) = class_of(module).__name__, names
    if not enabled("latent"):
        yield Finding("latent", target, module, reason=SWITCHED_OFF)
    elif _METHOD in module.__dict__:
        yield Finding("latent", target, module, reason=f"its {_METHOD} is already overridden")
    else:
        original = getattr(class_of(module), _METHOD)
        proof = probe.once(("latent", original, name, sizes), _prove, module, original, name, probe)
        finding = proved("latent", target, module, proof)
        yield dataclasses.replace(finding, bind=_bind)


def _projections(module: nn.Module) -> list[str]:
    """The children of `module` that its `expand_kv`, a method of the latents and the shared key, calls; or none."""
    method = inspect.unwrap(getattr(class_of(module), _METHOD, None) or find_latent)
    code = getattr(method, "__code__", None)
    if method is find_latent or code is None or code.co_argcount != 3:
        return []
    return [name for name, child in module._modules.items() if child is not None and name in code.co_names]


def _bind(module: nn.Module, method: Callable) -> None:
    bind_method(module, _METHOD, method)


def _prove(module: Any, original: Callable, name: str, probe: Probe) -> Proof:
    nope, rope, value = (getattr(module, size) for size in _SIZES)
    tensors = [
        probe.randn(_BATCH, 1, _LENGTH, _RANK),
        probe.randn(_BATCH, 1, _LENGTH, rope),
        probe.randn(_HEADS * (nope + value), _RANK) / 4,
    ]
    ours = expanding(original, name)
    theirs, own = (_computation(module, method, name) for method in (original, ours))
    agreement = probe.trial(theirs, tensors, LATENTS).prove(own)
    if not agreement.equal:
        return refused(agreement.explained("other keys and values than those of latents").reason)
    precisions = probe.precisions(theirs, own, tensors)
    return Proof(_KERNEL, expanding(original, name, precisions), agreement, precisions=precisions)


def _computation(module: nn.Module, method: Callable, name: str) -> Callable:
    def run(latents: torch.Tensor, r: torch.Tensor, weight: torch.Tensor, training: bool = True) -> Any:
        return method(dummy_module(module, {}, {name: projection(weight)}, training), latents, r)

    return run


@functools.cache
def expanding(original: Callable, projection: str, precisions: Precisions = EVERY_PRECISION) -> Callable:
    """Our `expand_kv`, which runs `original`, that of the class, where the proof does not hold.

    Args:
        original: The class's method.
        projection: The name of the up-projection.
        precisions: Where the proof holds.
    """

    @functools.wraps(original)
    def expand_kv(self, latents, shared_key):
        if getattr(type(self), _METHOD) is not original:  # another library has replaced it since
            return getattr(type(self), _METHOD)(self, latents, shared_key)
        if (
            not runs_ours(latents, precisions)
            or latents.dim() != 4
            or shared_key.dim() != 4
            or shared_key.shape[1] != 1
        ):
            return original(self, latents, shared_key)
        nope, value = self.qk_nope_head_dim, self.v_head_dim
        kv = getattr(self, projection)(latents)
        k, v = expand_keys(kv.view(*latents.shape[::2], -1, nope + value), shared_key.squeeze(1), nope)
        return k.transpose(1, 2), v.transpose(1, 2)

    return expand_kv


# ---------------------------------------------------------------------------------------------------------------------
# Queries
# ---------------------------------------------------------------------------------------------------------------------


def rotate_whole_queries(findings: Iterable[Finding], probe: Probe) -> list[Finding]:
    """`findings` with other forwards for latent attentions whose queries can be rotated as a whole."""
    findings = list(findings)
    latent = {id(each.module): place for place, each in enumerate(findings) if _is_applied(each, "latent")}
    for place, finding in enumerate(findings):
        if not _is_applied(finding, "rope") or id(finding.module) not in latent:
            continue
        sizes = [getattr(finding.module, size) for size in _SIZES[:2]]
        forward: Any = finding.forward
        for name, rotary in rotary_globals(forward):
            if not hasattr(rotary, "of_last_columns"):
                continue
            ours = rotary.of_last_columns()
            agreement = probe.once(("last columns", rotary, *sizes), _prove_queries, rotary, ours, *sizes, probe)
            copy = forward_calling(forward, name, ours) if agreement.equal else None
            if copy is not None:
                forward, own = copy, latent[id(finding.module)]
                error = max(findings[own].error or 0.0, agreement.error)
                findings[own] = dataclasses.replace(findings[own], kernel=_WITH_QUERIES, error=error)
        findings[place] = dataclasses.replace(finding, forward=forward)
    return findings


def _is_applied(finding: Finding, component: str) -> bool:
    return finding.component == component and finding.forward is not None


def _prove_queries(rotary: Any, ours: Callable, nope: int, rope: int, probe: Probe) -> Agreement:
    q = probe.randn(_BATCH, _LENGTH, _HEADS, nope + rope)
    k = probe.randn(_BATCH, _LENGTH, 1, rope)
    if arguments_of(rotary)[2:4] == ["cos", "sin"]:
        tables = [probe.randn(_BATCH, _LENGTH, rope) for _ in range(2)]
    else:
        tables = [torch.complex(*(probe.randn(_BATCH, _LENGTH, rope // 2) for _ in range(2)))]

    def queries(function: Callable) -> Callable:
        def run(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            front, last = torch.split(q.transpose(1, 2), [nope, rope], dim=-1)
            given = (each if each.is_complex() else each.to(q.dtype) for each in tables)
            last, k = function(last, k.transpose(1, 2), *given)
            joins.append(isinstance(last, LastColumns))
            return torch.cat((front, last), dim=-1), k

        return run

    joins: list[bool] = []
    agreement = probe.trial(queries(rotary.__wrapped__), [q, k], ROTATION).prove(queries(ours))
    if agreement.equal and not any(joins):  # the layout of such an attention's calls is not proved
        return dataclasses.replace(agreement, reason="its rotary function runs as it is")
    return agreement
