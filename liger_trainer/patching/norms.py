"""Normalisations: RMSNorm in the variants models write, and `nn.LayerNorm`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.norms.layer_norm import layer_norm
from liger_trainer.kernels.norms.rms_norm import rms_norm
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.patching.as_written import serves_as_written
from liger_trainer.patching.binding import call_like
from liger_trainer.patching.finding import Finding, proved, reason_to_leave
from liger_trainer.patching.fp8 import is_long_enough
from liger_trainer.patching.inputs import norm_inputs
from liger_trainer.patching.pending_norm import PendingNorm, may_pend
from liger_trainer.patching.probe import (
    EVERY_PRECISION,
    Precisions,
    Probe,
    Proof,
    dummy_module,
    full_shape,
    identity,
    no_formula,
    only_argument,
    refused,
)
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import Agreement, Trial

# (casting, offset). In float32 most of these are the same function; the bfloat16 distance distinguishes them, and of
# formulas that agree equally well the first is used.
RMS_NORM_FORMULAS = (("llama", 0.0), ("olmo2", 0.0), ("gemma", 1.0), ("none", 0.0))

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_NOT_ROW_NORMS = (nn.GroupNorm, nn.LocalResponseNorm)
_ROWS = (2, 5)
_ANY_SIZE = 64


def find_norm(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it looks like a normalisation over its last dimension, else None."""
    if type(module).forward is nn.LayerNorm.forward:
        return _find(module, "layer_norm", enabled, probe, _probe_layer_norm)
    over_batch = hasattr(module, "track_running_stats")  # a batch or instance norm
    if not module._modules and eps_name(module) and not over_batch and not isinstance(module, _NOT_ROW_NORMS):
        return _find(module, "rms_norm", enabled, probe, _probe_rms_norm)
    return None


def eps_name(module: nn.Module) -> str | None:
    """The name under which `module` keeps a float epsilon."""
    return next((name for name in _EPS_NAMES if isinstance(module.__dict__.get(name), float)), None)


def _find(module: nn.Module, component: str, enabled: Callable[[str], bool], probe: Probe, prove: Callable) -> Finding:
    target = type(module).__name__
    reason = reason_to_leave(module, enabled(component))
    if reason:
        return Finding(component, target, module, reason=reason)
    return proved(component, target, module, probe.once(identity(module), prove, module, probe))


def _probe_rms_norm(module: nn.Module, probe: Probe) -> Proof:
    present = {name: p for name, p in module._parameters.items() if p is not None}
    argument = only_argument(module)
    if argument is None:
        return refused("its forward takes more than the hidden states")
    others = sorted({*present, *(name for name, b in module._buffers.items() if b is not None)} - {"weight"})
    if others:
        return refused(f"it has {', '.join(others)} besides an RMSNorm's weight")
    weighted = "weight" in present
    shape = full_shape(present["weight"]) if weighted else ()
    if weighted and len(shape) != 1:
        return refused(f"its weight has {len(shape)} dimensions; an RMSNorm's has one")
    original = type(module).forward
    size = _size(module, shape)
    tensors = [probe.randn(*_ROWS, size), *([probe.randn(size)] if weighted else [])]
    name = eps_name(module)
    assert name is not None

    theirs = _on(module, original)
    trial = Trial(theirs, tensors, norm_inputs(getattr(module, name)))
    best: Proof | None = None
    failures: list[Agreement] = []
    formulas = RMS_NORM_FORMULAS if weighted else RMS_NORM_FORMULAS[:1] + RMS_NORM_FORMULAS[-1:]
    for casting, offset in formulas:
        options = (original, argument, name, offset, casting, weighted)
        ours = _on(module, rms_norm_forward(*options, mixed=True, precisions=EVERY_PRECISION))
        agreement = trial.compare(ours)
        if agreement.equal and best is not None and agreement.distance >= best.agreement.distance:
            continue
        agreement = trial.everywhere(ours, agreement)
        if agreement.equal:
            mixed, precisions = _dtype_cases(probe, theirs, ours, tensors)
            kernel = "rms_norm" if not weighted else f"rms_norm (casting={casting}{', 1 + weight' if offset else ''})"
            best = Proof(kernel, rms_norm_forward(*options, mixed=mixed, precisions=precisions), agreement, (name,))
        else:
            failures.append(agreement)
    return best or no_formula(failures, "none of the RMSNorm formulas")


def _probe_layer_norm(module: nn.Module, probe: Probe) -> Proof:
    normalized_shape: Any = module.normalized_shape
    if len(normalized_shape) != 1:
        return refused(f"it normalises over {len(normalized_shape)} dimensions; the kernel's is the last one")
    (size,) = normalized_shape
    present = [name for name in ("weight", "bias") if module._parameters.get(name) is not None]
    tensors = [probe.randn(*_ROWS, size), *(probe.randn(size) for _ in present)]
    theirs = _on(module, nn.LayerNorm.forward, present)
    ours = _on(module, layer_norm_forward(mixed=True, precisions=EVERY_PRECISION), present)
    eps: Any = module.eps
    agreement = Trial(theirs, tensors, norm_inputs(eps)).prove(ours)
    if not agreement.equal:
        return Proof(None, None, agreement)
    mixed, precisions = _dtype_cases(probe, theirs, ours, tensors)
    return Proof("layer_norm", layer_norm_forward(mixed=mixed, precisions=precisions), agreement, ("eps",))


def _on(module: nn.Module, forward: Callable, names: list[str] | None = None) -> Callable:
    """`forward` as a function of the input and the parameters, on a dummy of `module`."""

    def computation(x: torch.Tensor, *parameters: torch.Tensor, training: bool = True) -> torch.Tensor:
        given = dict(zip(names if names is not None else ["weight"], parameters))
        return run_part(forward, dummy_module(module, {**dict.fromkeys(module._parameters), **given}, {}, training), x)

    return computation


def _dtype_cases(
    probe: Probe, original: Callable, ours: Callable, tensors: list[torch.Tensor]
) -> tuple[bool, Precisions]:
    """Whether ours equals the original also if input and weight differ in dtype, and in which precisions."""
    half = [tensor.to(torch.bfloat16) for tensor in tensors]
    mixed = all(
        probe.same(original, ours, [half[0], *tensors[1:]], autocast)
        and probe.same(original, ours, [tensors[0], *half[1:]], autocast)
        for autocast in (False, True)
    )
    return mixed, probe.precisions(original, ours, tensors)


def _size(module: nn.Module, weight_shape: tuple[int, ...]) -> int:
    """The size of the last dimension, which `torch.nn.RMSNorm` checks; any size if it is unknown, as for a shard."""
    normalized = getattr(module, "normalized_shape", None)
    if isinstance(normalized, tuple) and len(normalized) == 1:
        return normalized[0]
    return (weight_shape[0] if weight_shape else 0) or _ANY_SIZE


def _plain(x: torch.Tensor, weight: torch.Tensor | None, mixed: bool, precisions: Precisions) -> bool:
    """Whether the kernel is proved equal for such tensors; DTensors run the original."""
    if is_dtensor(x) or (weight is not None and is_dtensor(weight)):
        return False
    if not mixed and weight is not None and weight.dtype != x.dtype:
        return False
    return precisions.cover(x)


@functools.cache
def rms_norm_forward(
    original: Callable,
    argument: str,
    eps: str,
    offset: float,
    casting: str,
    weighted: bool,
    *,
    mixed: bool,
    precisions: Precisions,
    pending: bool = False,
    casts: bool = False,
) -> Callable:
    """A forward for one kind of RMSNorm; the same function for equal arguments.

    Args:
        original: The class's forward, which runs for inputs that the proof does not cover.
        argument: Name of the forward's argument.
        eps: Name of the attribute that holds epsilon.
        offset: Added to the weight.
        casting: Where the result is rounded; see [`liger_trainer.functional.rms_norm`].
        weighted: Whether the module has a weight.
        mixed: Whether input and weight may differ in dtype.
        precisions: Where the proof holds.
        pending: Return a [`PendingNorm`] where [`may_pend`] says so.
        casts: Cast the result to fp8 as well, if linear layers in fp8 take as many rows.
    """

    def forward(self, hidden_states):
        weight = self.weight if weighted else None
        if (
            serves_as_written(hidden_states)
            or (weighted and weight is None)
            or not _plain(hidden_states, weight, mixed, precisions)
        ):
            return original(self, hidden_states)
        if pending and weight is not None and may_pend(self):
            return PendingNorm(hidden_states, weight, (getattr(self, eps), offset, casting))
        fp8 = casts and is_long_enough(hidden_states)
        return rms_norm(hidden_states, weight, getattr(self, eps), offset, casting, fp8)

    if weighted:
        options = (original, argument, eps, offset, casting, weighted)
        forward.rms_norm_options = options, {"mixed": mixed, "precisions": precisions}  # type: ignore[attr-defined]
    return call_like(forward, argument)


def pending_rms_norm_forward(forward: Callable) -> Callable:
    """The forward that may return a [`PendingNorm`], for one of [`rms_norm_forward`] with a weight."""
    options, cases = forward.rms_norm_options  # type: ignore[attr-defined]
    return rms_norm_forward(*options, **cases, pending=True)


def casting_rms_norm_forward(forward: Callable) -> Callable:
    """The forward that also casts its result to fp8, for one of [`rms_norm_forward`] with a weight."""
    options, cases = forward.rms_norm_options  # type: ignore[attr-defined]
    return rms_norm_forward(*options, **cases, casts=True)


@functools.cache
def layer_norm_forward(*, mixed: bool, precisions: Precisions) -> Callable:
    """A forward for `nn.LayerNorm`; see [`rms_norm_forward`] for the arguments."""

    def forward(self, input):
        if serves_as_written(input) or not _plain(input, self.weight, mixed, precisions):
            return nn.LayerNorm.forward(self, input)
        return layer_norm(input, self.weight, self.bias, self.eps)

    return forward
