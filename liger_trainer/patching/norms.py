"""Normalisations: RMSNorm in the variants models write, also with a gate, and LayerNorm: torch's and models' own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.norms.gated_rms_norm import ACTIVATIONS, CASTINGS
from liger_trainer.patching.as_written import EVERY_PRECISION, Precisions
from liger_trainer.patching.inputs import GATES, norm_inputs
from liger_trainer.patching.norm_forwards import (
    gated_rms_norm_forward,
    layer_norm_forward,
    own_layer_norm_forward,
    rms_norm_forward,
)
from liger_trainer.patching.probe import (
    Probe,
    Proof,
    arguments_of,
    dummy_module,
    full_shape,
    identity,
    no_formula,
    only_argument,
    refused,
)
from liger_trainer.patching.report import SWITCHED_OFF, Finding, proved, reason_to_leave
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import Agreement

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
        return _find(module, ("layer_norm",), enabled, probe, _probe_layer_norm)
    over_batch = hasattr(module, "track_running_stats")  # a batch or instance norm
    if not module._modules and eps_name(module) and not over_batch and not isinstance(module, _NOT_ROW_NORMS):
        if len(arguments_of(module)) == 2:
            return _find(module, ("rms_norm",), enabled, probe, _probe_gated_norm)
        return _find(module, ("rms_norm", "layer_norm"), enabled, probe, _probe_norm)
    return None


def eps_name(module: nn.Module) -> str | None:
    """The name under which `module` keeps a float epsilon."""
    return next((name for name in _EPS_NAMES if isinstance(module.__dict__.get(name), float)), None)


def _find(
    module: nn.Module, components: tuple[str, ...], enabled: Callable[[str], bool], probe: Probe, prove: Callable
) -> Finding:
    """The finding for a norm of one of `components`: the one that its proof says, or the first."""
    target = type(module).__name__
    reason = reason_to_leave(module, any(map(enabled, components)))
    if reason:
        return Finding(components[0], target, module, reason=reason)
    proof = probe.once(identity(module), prove, module, probe)
    component = "layer_norm" if (proof.kernel or "").startswith("layer_norm") else components[0]
    if not enabled(component):
        return Finding(component, target, module, reason=SWITCHED_OFF)
    return proved(component, target, module, proof)


def _probe_norm(module: nn.Module, probe: Probe) -> Proof:
    """The proof for a norm with a forward of its own."""
    argument, name, held = only_argument(module), eps_name(module), _tensors_of(module)
    if argument is None or name is None:
        return refused("its forward takes more than the hidden states")
    others = sorted({*held} - {"weight", "bias"})
    if others:
        return refused(f"it has {', '.join(others)} besides a norm's weight and bias")
    shapes, names = {full_shape(each) for each in held.values()}, [*held]
    if len(shapes) > 1 or any(len(shape) not in (1, 2) for shape in shapes):
        return refused("its weight and bias are neither of a row nor of heads")
    shape = next(iter(shapes), ())
    original, weighted, biased = type(module).forward, "weight" in names, "bias" in names
    candidates: list[_Candidate] = []
    if len(shape) < 2 and not biased:
        for casting, offset in RMS_NORM_FORMULAS if weighted else RMS_NORM_FORMULAS[:1] + RMS_NORM_FORMULAS[-1:]:
            kernel = f"rms_norm (casting={casting}{', 1 + weight' if offset else ''})" if weighted else "rms_norm"
            candidates.append((kernel, partial(rms_norm_forward, original, argument, name, offset, casting, weighted)))
    heads = len(shape) == 2
    layer_norm_of = partial(own_layer_norm_forward, original, argument, name, weighted, biased, heads)
    what = "none of the RMSNorm formulas, nor LayerNorm's" if candidates else "another formula than LayerNorm's"
    candidates.append(("layer_norm of heads" if heads else "layer_norm", layer_norm_of))
    row = (*shape[:-1], _size(module, shape))  # the weight may be an empty shard
    tensors = [probe.randn(*_ROWS, *row), *(probe.randn(*row) for _ in names)]
    return _nearest(module, probe, name, names, tensors, candidates, what)


def _probe_gated_norm(module: nn.Module, probe: Probe) -> Proof:
    """The proof for a norm whose forward takes two tensors."""
    name, held = eps_name(module), _tensors_of(module)
    shapes = {each: full_shape(tensor) for each, tensor in held.items()}
    if name is None or [*shapes] != ["weight"] or len(shapes["weight"]) != 1:
        return refused("its forward takes more than the hidden states")
    (size,) = shapes["weight"]
    tensors = [probe.randn(*_ROWS, size), probe.randn(*_ROWS, size), probe.randn(size)]
    options = type(module).forward, arguments_of(module), name
    candidates: list[_Candidate] = []
    for group_size in _group_sizes(module, size):
        for casting, activation, gate_first in itertools.product(CASTINGS, ACTIVATIONS, (False, True)):
            kernel = f"rms_norm (casting={casting}, {activation} gate {'first' if gate_first else 'last'}"
            kernel += ")" if group_size == size else f", groups of {group_size})"
            formula = size, group_size, activation, gate_first, casting
            candidates.append((kernel, partial(gated_rms_norm_forward, *options, *formula)))
    return _nearest(module, probe, name, [*held], tensors, candidates, "none of the formulas of RMSNorm with a gate")


def _probe_layer_norm(module: nn.Module, probe: Probe) -> Proof:
    normalized_shape: Any = module.normalized_shape
    if len(normalized_shape) != 1:
        return refused(f"it normalises over {len(normalized_shape)} dimensions; the kernel's is the last one")
    (size,) = normalized_shape
    names = [*_tensors_of(module)]
    tensors = [probe.randn(*_ROWS, size), *(probe.randn(size) for _ in names)]
    return _nearest(module, probe, "eps", names, tensors, [("layer_norm", layer_norm_forward)])


_Candidate = tuple[str, Callable[..., Callable]]
"""A kernel's name in the report, and what makes its forward, given `mixed` and `precisions`."""


def _nearest(
    module: nn.Module,
    probe: Probe,
    eps: str,
    names: list[str],
    tensors: list[torch.Tensor],
    candidates: Iterable[_Candidate],
    what: str = "",
) -> Proof:
    """The proof of the candidate that equals `module`, and rounds most as it does; of equally near ones, the first.

    `tensors` are its inputs, and then values for its parameters `names`; `what` is the formula in the reason of the
    report if `module` computes none of the candidates.
    """
    theirs = _on(module, type(module).forward, names)
    gated = len(tensors) - len(names) == 2
    trial = probe.trial(theirs, tensors, norm_inputs(getattr(module, eps)) + (GATES if gated else ()))
    on_cpu = trial.on_cpu()
    compared: list[tuple[Agreement, _Candidate]] = []
    with probe.on_cpu():
        for kernel, make in candidates:
            ours = _on(module, make(mixed=True, precisions=EVERY_PRECISION), names)
            compared.append((on_cpu.compare(ours), (kernel, make)))
    failures = [agreement for agreement, _ in compared if not agreement.equal]
    nearest = sorted((each for each in compared if each[0].equal), key=lambda each: each[0].distance)
    for agreement, (kernel, make) in nearest:
        ours = _on(module, make(mixed=True, precisions=EVERY_PRECISION), names)
        agreement = trial.everywhere(ours, agreement if trial is on_cpu else trial.compare(ours))
        if agreement.equal:
            mixed, precisions = _dtype_cases(probe, theirs, ours, tensors)
            return Proof(kernel, make(mixed=mixed, precisions=precisions), agreement, (eps,), precisions)
        failures.append(agreement)
    return no_formula(failures, what) if what else Proof(None, None, failures[0])


def _tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers that `module` has."""
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def _group_sizes(module: nn.Module, size: int) -> list[int]:
    """How many elements may make a group in rows of `size`, judging by the module's whole numbers."""
    numbers = {value for value in module.__dict__.values() if type(value) is int and 0 < value <= size}
    divisors = {number for number in numbers if size % number == 0}
    return [size, *sorted(({*divisors} | {size // each for each in divisors}) - {1, size})]


def _on(module: nn.Module, forward: Callable, names: list[str]) -> Callable:
    """`forward` as a function of its inputs and the parameters `names`, on a dummy of `module`."""

    def computation(*tensors: torch.Tensor, training: bool = True) -> torch.Tensor:
        inputs = len(tensors) - len(names)
        parameters = {**dict.fromkeys(module._parameters), **dict(zip(names, tensors[inputs:]))}
        return run_part(forward, dummy_module(module, parameters, {}, training), *tensors[:inputs])

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
    return (weight_shape[-1] if weight_shape else 0) or _ANY_SIZE
