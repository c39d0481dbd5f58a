"""Linear layers of the decoder that multiply in fp8 (`kernels/fp8/linear.py`).

This changes the arithmetic, so nothing is proved: `fp8` has to be set. The layers are the plain linear layers of all
decoder layers, but for the first and the last unless `fp8_all_layers` is set, with at least 1,024 input and output
features. The head, embeddings, routers, experts and vision towers stay in bf16, and so do layers with adapters, whose
own operators multiply their bases.

Calls with fewer than 2,048 rows, such as the steps of a generation, run in bf16. Casting a weight takes time that does
not depend on the rows, and a product in fp8 saves time for each row. Both grow with the size of the weight, so one
number of rows holds for all layers. On an H200, the casts of a Llama-3 8B layer's query, output and MLP weights take as
long as their products save on 1,800 rows, and the rows are cast too (`docs/guides/fp8.md` has the times).

Norms whose results such layers read cast them as well, in the same pass. The forward of a decoder layer runs on a dummy
whose children note what they are given. A norm casts if its result, the very tensor, reaches a linear layer in fp8, be
it inside the attention or the MLP. So no cast is made for a norm after an attention or an MLP, as Gemma 3 has, nor for
one before layers that all have adapters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.head.lm_head import without_adapters
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.fp8.linear import fp8_linear, has_fp8, takes_fp8
from liger_trainer.kernels.fp8.modes import Fp8Mode, Scaling, products_of
from liger_trainer.kernels.fp8.row_cast import MULTIPLE
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.lora.operands import is_lora_linear
from liger_trainer.patching.probe import Probe, class_of, dummy_module, full_shape
from liger_trainer.patching.report import Finding, bind_own_code, reason_to_leave

LEAST_FEATURES = 1024
LEAST_ROWS = 2048
ENDS = "the first and the last layer stay in bf16, unless `fp8_all_layers` is set"
ADAPTED = "it has adapters; their bases are multiplied in bf16"


@functools.cache
def forward_in(mode: Fp8Mode) -> Callable:
    """The forward that is bound to a linear layer; the same function for the same mode."""

    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if not is_long_enough(input):
            return F.linear(input, weight, bias)
        if not takes_fp8(input, weight):
            warn_once(
                "fp8",
                f"`fp8` is set, but a layer multiplies {input.dtype} by {weight.dtype}, as without it: fp8 is for "
                "models in bfloat16 and for bf16 autocast. (Shown once.)",
            )
        return fp8_linear(input, weight, bias, mode)

    forward.fp8_mode = mode  # type: ignore[attr-defined]
    return forward


def mode_of(module: nn.Module) -> Fp8Mode | None:
    """The mode in which `module` multiplies in fp8; None if its forward is not ours for that."""
    return getattr(module.__dict__.get("forward"), "fp8_mode", None)  # a method has its function's attributes


def mode_for(module: nn.Module, x: torch.Tensor) -> Fp8Mode | None:
    """The mode in which `module` multiplies `x`, (..., features); None for too few rows too."""
    mode = mode_of(module)
    return mode if mode is not None and is_long_enough(x) else None


def is_long_enough(x: torch.Tensor) -> bool:
    """Whether `x`, (..., features), has as many rows as it takes for fp8 to pay."""
    return x.shape[:-1].numel() >= LEAST_ROWS


def find_fp8(model: nn.Module, mode: Fp8Mode | None, all_layers: bool, device: torch.device) -> Iterator[Finding]:
    """A finding for each linear layer of `model`'s decoder, if `mode` is set."""
    if mode is None:
        return
    layers = decoder_layers(model)
    if not layers:
        yield Finding("fp8", type(without_adapters(model)).__name__, model, reason="its decoder has no list of layers")
    kept = () if all_layers else (0, len(layers) - 1)
    for place, layer in enumerate(layers):
        adapted = {id(part) for module in layer.modules() if is_lora_linear(module) for part in module.modules()}
        for name, module in layer.named_modules():
            if type(module) is not nn.Linear:
                continue
            reason = ENDS if place in kept else _obstacle(name, module, id(module) in adapted, device)
            if reason:
                yield Finding("fp8", "Linear", module, reason=reason)
            else:
                yield Finding("fp8", "Linear", module, f"fp8_linear ({mode})", forward_in(mode), bind=bind_own_code)


def decoder_layers(model: nn.Module) -> nn.ModuleList | list[nn.Module]:
    """The layers of the language model in `model`; none if it has no decoder with a list of them."""
    base: Any = without_adapters(model)
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else base
    layers = getattr(decoder, "layers", None)
    return layers if isinstance(layers, nn.ModuleList) else []


def _obstacle(name: str, module: nn.Linear, has_adapters: bool, device: torch.device) -> str:
    if not has_fp8(device):
        return f"{device.type} has no fp8 matmuls with a scale for each row, which NVIDIA's Hopper and newer have"
    if min(module.weight.shape) < LEAST_FEATURES:
        return f"fewer than {LEAST_FEATURES} features, for which fp8 does not pay"
    if has_adapters:
        return ADAPTED
    if "experts" in name.split("."):
        return "experts stay in bf16"
    if is_dtensor(module.weight):
        return "its weight is split over processes"
    if any(size % MULTIPLE for size in module.weight.shape):
        return f"its weight is {tuple(module.weight.shape)}; the sizes must be multiples of {MULTIPLE}"
    return reason_to_leave(module, is_enabled=True)


# ---------------------------------------------------------------------------------------------------------------------
# Norms that cast their results
# ---------------------------------------------------------------------------------------------------------------------

_LENGTH = 3
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def cast_in_norms(findings: Iterable[Finding], model: nn.Module, mode: Fp8Mode | None, probe: Probe) -> list[Finding]:
    """`findings` with other forwards for the norms of `model` whose results linear layers in fp8 read.

    Nothing changes unless `mode` gives each row of an input a scale of its own.
    """
    findings = list(findings)
    if mode is None or products_of(mode).output[0] is not Scaling.ROWS:
        return findings
    linears = {id(each.module) for each in findings if each.component == "fp8" and each.forward is not None}
    places = {id(each.module): place for place, each in enumerate(findings) if hasattr(each.forward, "casting")}
    for layer in decoder_layers(model):
        norms = {name for name, child in layer._modules.items() if id(child) in places}
        read_in_fp8 = tuple(name for name, module in layer.named_modules() if id(module) in linears)
        if not norms or not read_in_fp8 or overriding_forward(layer) is not None:
            continue
        key = "norms before fp8", class_of(layer).forward, tuple(sorted(norms)), read_in_fp8
        for name in probe.once(key, _norms_before, layer, norms, linears):
            place = places[id(layer._modules[name])]
            norm = findings[place]
            forward = norm.forward.casting()  # type: ignore[union-attr]
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
    """The children of a decoder layer, among its `norms`, whose results layers of `linears` read."""
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
