"""Rotary position embedding: the function that an attention's forward calls by a global name, and the norms before it.

The function is compared with ours. Where they agree, the attention instance gets a copy of its class's forward in which
that name refers to our function (`compat/rebound.py`). The function itself, and every other model in the process, do
not change.

Norms of queries and keys whose results go straight into the rotary function are computed with it, in one pass. Once the
norms and the function are proved, the attention's forward runs on a dummy module up to the function. If the q and k
that arrive there are results of two of its norms, these norms return a [`PendingNorm`] while the attention runs. Any
other use of such a result computes the norm, and other callers of the norms get ordinary tensors.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.rebound import forward_calling, used_globals
from liger_trainer.compat.transformers import ROTARY_FUNCTION
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.norm_forwards import PendingNorm, forward_awaiting
from liger_trainer.patching.probe import Probe, ProjectionToOnes, full_shape, run_attention
from liger_trainer.patching.report import Finding, bind_own_code, reason_to_leave
from liger_trainer.patching.rotations import ONE_TENSOR, arguments_of, prove_rotation

HIDDEN_CALL = "its forward is decorated in a way that hides the call"


def find_rope(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Iterator[Finding]:
    """The finding for every rotary function that `module`'s forward calls by a global name."""
    patched = type(module).forward
    if enabled("rope") and "transformers.modeling_utils" in sys.modules:  # else the model is not one of its models
        available(ROTARY_FUNCTION)
    functions: list[tuple[str, Callable]] = probe.once(("rope", patched), list, rotary_globals(patched))
    for name, function in functions:
        target = f"{name} in {type(module).__name__}"
        reason = reason_to_leave(module, enabled("rope"))
        if reason:
            yield Finding("rope", target, module, reason=reason)
            continue
        kernel, rotary, agreement, _ = probe.once(("rope", name, function), prove_rotation, function, probe)
        copy = None if rotary is None else forward_calling(patched, name, rotary)
        if copy is None:
            yield Finding("rope", target, module, reason=agreement.reason or HIDDEN_CALL)
        else:
            patched = copy  # with several functions, the forward that is bound last calls all of ours
            yield Finding("rope", target, module, kernel, patched, agreement.error, bind=bind_own_code)


def rotary_globals(forward: Callable) -> Iterator[tuple[str, Callable]]:
    """The rotary functions that `forward`, or what it wraps, calls by a global name."""
    function: Any = forward
    while isinstance(function, types.FunctionType):
        for name, value in used_globals(function).items():
            if not callable(value) or isinstance(value, type):
                continue
            arguments = arguments_of(value)
            rotates = arguments[:4] == ["q", "k", "cos", "sin"] or arguments == ONE_TENSOR
            if rotates or ("apply" in name and "rotary" in name):
                yield name, value
        function = getattr(function, "__wrapped__", None)


# ---------------------------------------------------------------------------------------------------------------------
# Norms of queries and keys
# ---------------------------------------------------------------------------------------------------------------------

_HIDDEN_SIZE, _LENGTH, _HEADS = 8, 3, 2


class _ArrivedError(Exception):
    """Holds the arguments of the rotary function."""

    def __init__(self, q: Any, k: Any) -> None:
        self.q, self.k = q, k


def _arrive(q, k, *_args, **_kwargs):
    raise _ArrivedError(q, k)


class _Norm(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: torch.Tensor) -> PendingNorm:
        return PendingNorm(x, x.new_ones(x.shape[-1]), (0.0, 0.0, self.name))


def fuse_qk_norms(findings: Iterable[Finding], probe: Probe) -> list[Finding]:
    """`findings` with other forwards for attentions and norms wherever norms and rotation can be fused."""
    findings = list(findings)
    norms = {id(f.module): f for f in findings if hasattr(f.forward, "pending")}
    replaced: dict[int, Finding] = {}
    for finding in findings:
        if finding.component != "rope" or finding.forward is None:
            continue
        candidates = {name: norms[id(child)] for name, child in finding.module._modules.items() if id(child) in norms}
        for name, rotary in rotary_globals(finding.forward):
            names = _norms_before(finding.module, name, candidates, probe) if hasattr(rotary, "of_pending") else None
            if names is None:
                continue
            forward = forward_calling(finding.forward, name, rotary.of_pending)  # type: ignore[attr-defined]
            if forward is None:
                continue
            kernel = f"{finding.kernel} with the norms of q and k"
            replaced[id(finding)] = dataclasses.replace(
                finding, forward=forward_awaiting(forward, names), kernel=kernel
            )
            for norm in (candidates[child] for child in names):
                replaced[id(norm)] = dataclasses.replace(norm, forward=norm.forward.pending())  # type: ignore[union-attr]
    return [replaced.get(id(finding), finding) for finding in findings]


def _norms_before(
    module: nn.Module, rotary_name: str, candidates: dict[str, Finding], probe: Probe
) -> tuple[str, str] | None:
    """The names of the two norms whose results arrive at the rotary function as q and k, or None."""
    sizes = {full_shape(norm.module._parameters["weight"])[0] for norm in candidates.values()}  # type: ignore[arg-type]
    if len(candidates) < 2 or len(sizes) != 1 or overriding_forward(module) is not None:
        return None
    (head_dim,) = sizes
    kernels = {norm.kernel for norm in candidates.values()}
    key = ("norms before", type(module).forward, rotary_name, head_dim, tuple(candidates), len(kernels))
    return probe.once(key, _run_to_rotary, module, rotary_name, candidates, head_dim)


def _run_to_rotary(
    module: nn.Module, rotary_name: str, candidates: dict[str, Finding], head_dim: int
) -> tuple[str, str] | None:
    forward = forward_calling(type(module).forward, rotary_name, _arrive)
    if forward is None:
        return None
    children = {
        name: _Norm(name) if name in candidates else ProjectionToOnes(_HEADS * head_dim)
        for name, child in module._modules.items()
        if child is not None
    }
    try:
        run_attention(forward, module, children, torch.ones(1, _LENGTH, _HIDDEN_SIZE), head_dim)
    except _ArrivedError as arrived:
        q, k = arrived.q, arrived.k
        if isinstance(q, PendingNorm) and isinstance(k, PendingNorm) and q.is_pending and k.is_pending:
            names = q.options[2], k.options[2]
            return names if len(set(names)) == 2 else None
    except Exception:
        return None
    return None
