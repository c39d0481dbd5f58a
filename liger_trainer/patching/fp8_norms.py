"""Norms whose results linear layers in fp8 read: they cast their results as well, in the same pass.

The forward of a decoder layer runs on a dummy whose children note what they are given. A norm casts if its result, the
very tensor, reaches a linear layer in fp8, be it inside the attention or the MLP. So no cast is made for a norm after
an attention or an MLP, as Gemma 3 has, nor for one before layers that all have adapters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.kernels.fp8.modes import Fp8Mode, Scaling, products_of
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.finding import Finding
from liger_trainer.patching.fp8 import decoder_layers
from liger_trainer.patching.norm_forwards import casting_rms_norm_forward
from liger_trainer.patching.probe import Probe, class_of, dummy_module, full_shape

_LENGTH = 3
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def cast_in_norms(findings: Iterable[Finding], model: nn.Module, mode: Fp8Mode | None, probe: Probe) -> list[Finding]:
    """`findings` with other forwards for the norms of `model` whose results linear layers in fp8 read.

    Args:
        findings: Those of the norms and of the linear layers, among others.
        model: The model, adapters included.
        mode: The value of `fp8`. Nothing changes unless it gives each row of an input a scale of its own.
        probe: Runs the layers' forwards.
    """
    findings = list(findings)
    if mode is None or products_of(mode).output[0] is not Scaling.ROWS:
        return findings
    linears = {id(each.module) for each in findings if each.component == "fp8" and each.forward is not None}
    places = {
        id(each.module): place for place, each in enumerate(findings) if hasattr(each.forward, "rms_norm_options")
    }
    for layer in decoder_layers(model):
        norms = {name for name, child in layer._modules.items() if id(child) in places}
        read_in_fp8 = tuple(name for name, module in layer.named_modules() if id(module) in linears)
        if not norms or not read_in_fp8 or overriding_forward(layer) is not None:
            continue
        key = "norms before fp8", class_of(layer).forward, tuple(sorted(norms)), read_in_fp8
        for name in probe.once(key, _norms_before, layer, norms, linears):
            place = places[id(layer._modules[name])]
            norm = findings[place]
            forward = casting_rms_norm_forward(norm.forward)  # type: ignore[arg-type]
            findings[place] = dataclasses.replace(norm, forward=forward, kernel=f"{norm.kernel}, cast to fp8")
    return findings


class _Call(NamedTuple):
    """A call of the child `module`: its name there, the tensor that it got, and the dummy's result."""

    name: str
    module: nn.Module
    x: torch.Tensor
    result: torch.Tensor


class _Recorder(nn.Module):
    """Notes its calls in place of `module`."""

    def __init__(self, name: str, module: nn.Module, calls: list[_Call]) -> None:
        super().__init__()
        self.width = getattr(module, "out_features", None)
        self.note = lambda x, result: calls.append(_Call(name, module, x, result))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        # Two in one, as layers unpack what an attention returns, but not what an MLP does.
        result = x.new_ones((2, *x.shape[-2:]) if self.width is None else (*x.shape[:-1], self.width))
        self.note(x, result)
        return result


def _norms_before(layer: nn.Module, norms: Set[str], linears: Set[int]) -> list[str]:
    """Those of the children `norms` of a decoder layer whose results layers of `linears` read."""
    (size,) = full_shape(layer._modules[min(norms)]._parameters["weight"])  # type: ignore[union-attr, arg-type]
    calls = _calls(layer, torch.ones(1, _LENGTH, size))
    results = [(call.name, call.result) for call in calls if call.name in norms]
    return [
        name
        for name, result in results
        if any(call.x is result and _passes_on(call.module, size, linears) for call in calls)
    ]


def _passes_on(module: nn.Module, size: int, linears: Set[int]) -> bool:
    """Whether `module` is a layer of `linears`, or gives one of them its input as it is."""
    if id(module) in linears:
        return True
    if not any(id(inner) in linears for inner in module.modules()):
        return False
    x = torch.ones(1, _LENGTH, size)
    return any(call.x is x and _passes_on(call.module, size, linears) for call in _calls(module, x))


def _calls(module: nn.Module, x: torch.Tensor) -> list[_Call]:
    """The calls of its children that the forward of `module` makes on `x`, up to where the dummies do not do."""
    calls: list[_Call] = []
    children = {name: _Recorder(name, child, calls) for name, child in module._modules.items() if child is not None}
    forward = class_of(module).forward
    with contextlib.suppress(Exception):
        _, _, *others = inspect.signature(forward).parameters.values()
        required = {other.name: None for other in others if other.default is other.empty and other.kind in _NAMED}
        forward(dummy_module(module, {}, children), x, **required)
    return calls
