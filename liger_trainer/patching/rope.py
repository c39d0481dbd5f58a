"""Rotary position embedding: the function that an attention's forward calls by a global name, and the norms before it.

The function is compared with ours. Where they agree, the attention instance gets a copy of its class's forward in which
that name refers to our function (`compat/rebound.py`). The function itself, and every other model in the process, do
not change.

Norms of queries and keys whose results go straight into the rotary function are computed with it, in one pass. Once the
norms and the function are proved, the attention's forward runs on a dummy module up to the function. If the q and k
that arrive there are results of two of its norms, these norms return a [`PendingNorm`] while the attention runs. Any
other use of such a result computes the norm, and other callers of the norms get ordinary tensors. A function of one
tensor is called for each of them; an attention whose keys are those of another layer calls it once.
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
from liger_trainer.patching.rotations import arguments_of, prove_rotation, takes_one_tensor

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
        kernel, rotary, agreement, *_ = probe.once(("rope", name, function), prove_rotation, function, probe)
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
            rotates = arguments[:4] == ["q", "k", "cos", "sin"] or takes_one_tensor(arguments)
            if rotates or ("apply" in name and "rotary" in name):
                yield name, value
        function = getattr(function, "__wrapped__", None)


# ---------------------------------------------------------------------------------------------------------------------
# Norms of queries and keys
# ---------------------------------------------------------------------------------------------------------------------

_HIDDEN_SIZE, _LENGTH, _HEADS = 8, 3, 2


class _ArrivedError(Exception):
    """Ends the forward of an attention once all that its norms made has arrived at the rotary function."""


class _Arrivals:
    """Stands in for a rotary function, and keeps what arrives there until it is `awaited` many tensors.

    Args:
        awaited: How many end the forward.
        at_once: How many the function takes in a call.
    """

    def __init__(self, awaited: int, at_once: int) -> None:
        self.awaited, self.at_once = awaited, at_once
        self.arrived: list[Any] = []

    def __call__(self, *args: Any, **_kwargs: Any) -> Any:
        self.arrived += [(each, getattr(each, "is_pending", False)) for each in args[: self.at_once]]
        if len(self.arrived) >= self.awaited:
            raise _ArrivedError
        return getattr(args[0], "x", args[0])

    def names(self) -> tuple[str, ...] | None:
        """The names of the norms whose results have arrived; None if something else did."""
        if not all(isinstance(each, PendingNorm) and pending for each, pending in self.arrived):
            return None
        names = tuple(each.options[2] for each, _ in self.arrived)
        return names if len({*names}) == len(names) == self.awaited else None


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
            if not hasattr(rotary, "of_pending"):
                continue
            at_once = 1 if takes_one_tensor(arguments_of(rotary)) else 2
            names = _norms_before(finding.module, name, at_once, candidates, probe)
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
    module: nn.Module, rotary_name: str, at_once: int, candidates: dict[str, Finding], probe: Probe
) -> tuple[str, ...] | None:
    """The names of the norms whose results arrive at the rotary function, which takes 2 or 1 `at_once`, or None."""
    sizes = {full_shape(norm.module._parameters["weight"])[0] for norm in candidates.values()}  # type: ignore[arg-type]
    if len(candidates) < at_once or len(sizes) != 1 or overriding_forward(module) is not None:
        return None
    (head_dim,) = sizes
    kernels = {norm.kernel for norm in candidates.values()}
    key = ("norms before", type(module).forward, rotary_name, head_dim, tuple(candidates), len(kernels))
    return probe.once(key, _run_to_rotary, module, rotary_name, at_once, candidates, head_dim)


def _run_to_rotary(
    module: nn.Module, rotary_name: str, at_once: int, candidates: dict[str, Finding], head_dim: int
) -> tuple[str, ...] | None:
    arrivals = _Arrivals(2 if at_once == 2 else len(candidates), at_once)
    forward = forward_calling(type(module).forward, rotary_name, arrivals)
    if forward is None:
        return None
    children = {
        name: _Norm(name) if name in candidates else ProjectionToOnes(_HEADS * head_dim)
        for name, child in module._modules.items()
        if child is not None
    }
    try:
        run_attention(forward, module, children, torch.ones(1, _LENGTH, _HIDDEN_SIZE), head_dim)
    except _ArrivedError:
        return arrivals.names()
    except Exception:
        return None
    return None
