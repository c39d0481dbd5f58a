"""Whether the layers of a model's adapters compute each token by itself, and whether they draw random numbers.

The proof of packing runs on a small copy of the model, which has no adapters. So each distinct layer of them is tried
itself: on the base that it has, a few random tokens go through it together and alone. What runs are copies of its
modules, with noise in its weights, since most adapters begin as nothing. The model is not touched.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import warnings
from typing import Any

import torch
from torch import nn

from liger_trainer.callbacks.logged import is_distributed
from liger_trainer.compat.peft import TRIED_ADAPTERS
from liger_trainer.compat.private import require
from liger_trainer.head.lm_head import sharding_of
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.patching.moe.lora_experts import is_param_wrapper
from liger_trainer.patching.probe import HOOKS, neutral
from liger_trainer.patching.side_effects import copies_of_containers
from liger_trainer.patching.trial import relative_difference
from liger_trainer.trainers.checkpoints.run_state import random_numbers, set_random_numbers

logger = logging.getLogger("liger_trainer")

_TOKENS = 4
_WIDE = (torch.float32, torch.float64)
_FLOATS = (torch.float16, torch.bfloat16, *_WIDE)
_TOLERANCE, _TOLERANCE_OF_HALF = 1e-4, 2**-5
"""The largest difference of a token alone, relative to the largest value: another product may round otherwise."""


@dataclasses.dataclass(frozen=True)
class TriedAdapters:
    """What was found of the layers of a model's adapters."""

    mixing: str = ""  # why its batches cannot be packed; empty if they can
    drawing: str = ""  # the class of a layer that draws random numbers in training; empty if none does
    always: bool = False  # whether one draws in evaluation too

    def __or__(self, other: TriedAdapters) -> TriedAdapters:
        return TriedAdapters(self.mixing or other.mixing, self.drawing or other.drawing, self.always or other.always)


def try_adapters(model: nn.Module) -> TriedAdapters:
    """Tries every distinct layer of the adapters of `model`, one of each class, structure and shapes.

    Of several processes, all get what any of them has found. A layer that cannot be tried counts as one that computes
    each token by itself: its weights are elsewhere, or its forward takes more than tokens.
    """
    layers = _distinct_layers(model)
    if not layers:
        return TriedAdapters()
    found = TriedAdapters()
    numbers = random_numbers()
    try:
        for layer in layers:
            try:
                found = found | _tried(layer, model)
            except Exception as error:  # of another library's code, on inputs that it may not take
                logger.debug("%s could not be tried: %s", _name(layer), error)
    finally:
        set_random_numbers(numbers)
    if is_distributed():
        of_all: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(of_all, found)
        for each in of_all:
            found = found | each
    return found


def _distinct_layers(model: nn.Module) -> list[Any]:
    adapted = [module for module in model.modules() if hasattr(module, "base_layer") and not is_param_wrapper(module)]
    if not adapted:
        return []
    tuner_layer, *_ = require(TRIED_ADAPTERS)
    found: dict[Any, Any] = {}
    for layer in adapted:
        if isinstance(layer, tuner_layer):
            shapes = [(name, tuple(each.shape), each.dtype) for name, each in layer.named_parameters()]
            found.setdefault((type(layer), repr(layer), *shapes, *layer.active_adapters), layer)
    return list(found.values())


def _name(layer: nn.Module) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


def _tried(layer: Any, model: nn.Module) -> TriedAdapters:
    base, parameters = layer.get_base_layer(), [*layer.parameters()]
    size: Any = getattr(base, "in_features", getattr(base, "nx", None))  # `nx`: of GPT-2's layers
    entries = getattr(base, "num_embeddings", None)
    elsewhere = any(each.is_meta or is_dtensor(each) for each in parameters) or any(map(sharding_of, layer.modules()))
    if elsewhere or not parameters or (size is None and entries is None):
        return TriedAdapters()
    device = next(iter(base.parameters()), parameters[0]).device
    generator = torch.Generator("cpu").manual_seed(0)
    if entries is not None:
        tokens = torch.randint(entries, (1, _TOKENS), generator=generator, device="cpu").to(device)
    else:
        drawn = torch.randn(1, _TOKENS, size, generator=generator, device="cpu", dtype=torch.float32)
        tokens = drawn.to(device, _dtype_of(base, model))
    exact = all(each.dtype in _WIDE for each in parameters)
    with warnings.catch_warnings(), neutral(device):
        warnings.simplefilter("ignore")
        try:
            return _compared(layer, tokens, _TOLERANCE if exact else _TOLERANCE_OF_HALF)
        except Exception:  # of dtypes that differ: the trainer's autocast, in which it may be meant to run, mends that
            with torch.autocast(device.type, torch.bfloat16):
                return _compared(layer, tokens, _TOLERANCE_OF_HALF)


def _dtype_of(base: nn.Module, model: nn.Module) -> torch.dtype:
    """Of the tokens that reach `base`: its weight's, or the model's where that is in codes."""
    dtypes = (each.dtype for module in (base, model) for each in module.parameters())
    return next((each for each in dtypes if each in _FLOATS), torch.float32)


def _compared(layer: Any, tokens: torch.Tensor, tolerance: float) -> TriedAdapters:
    found, what = TriedAdapters(), f"{_name(layer)}, a layer of its adapters,"
    for training in (True, False):
        tried = _noisy_copy(layer, training)
        kept = _statistics(tried)
        with _same_draws(tokens.device):
            together = tried(tokens).detach()
            changed = _statistics(tried)
            again = tried(tokens).detach()
        if not together.isfinite().all():
            return found
        if not torch.equal(together, again):
            found = found | TriedAdapters(drawing=_name(layer), always=not training)
        else:
            error = max(
                relative_difference(together[:, each], tried(tokens[:, [each]])[:, 0]) for each in (0, _TOKENS - 1)
            )
            if error > tolerance:
                return found | TriedAdapters(f"{what} gives a token other values among others than alone ({error:.1e})")
        if _differ(kept, changed):
            other = _noisy_copy(layer, training)
            with _same_draws(tokens.device):
                other(tokens[:, :1])
            if _differ(changed, _statistics(other)):
                return found | TriedAdapters(f"{what} keeps statistics of its tokens, among which padding is")
    return found


def _same_draws(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def _statistics(layer: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers of an adapter's layer, in which it may keep what it saw."""
    own = ((name, each) for name, each in layer.named_buffers() if not name.startswith("base_layer."))
    return {name: each.clone() for name, each in own if each.is_floating_point()}


def _differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() != other.keys() or any(not torch.equal(each, other[name]) for name, each in one.items())


# ---------------------------------------------------------------------------------------------------------------------
# Copies
# ---------------------------------------------------------------------------------------------------------------------


def _noisy_copy(layer: Any, training: bool) -> nn.Module:
    """A copy of the modules of `layer`, without hooks. Its own weights have noise; those of its base are shared."""
    copies = _Copies({id(module) for module in layer.get_base_layer().modules()}, training)
    return copies.of(layer)


class _Copies:
    """Copies of modules, of which one that is in two places has one; those with an id in `base` keep their weights."""

    def __init__(self, base: set[int], training: bool) -> None:
        self._base, self._training = base, training
        self._made: dict[int, Any] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def of(self, module: nn.Module) -> Any:
        """The copy of `module`."""
        if id(module) in self._made:
            return self._made[id(module)]
        made: nn.Module = object.__new__(type(module))
        self._made[id(module)] = made
        is_base = id(module) in self._base
        if is_base:
            made.__dict__.update(copies_of_containers(module.__dict__))
        else:  # without a forward of ours or accelerate's, which is of `module` itself
            made.__dict__.update({name: _own(value) for name, value in module.__dict__.items() if name != "forward"})
            made.__dict__["_parameters"] = {name: self._noisy(each) for name, each in module._parameters.items()}
            made.__dict__["_buffers"] = {name: _cloned(each) for name, each in module._buffers.items()}
        made.__dict__.update({name: type(module.__dict__[name])() for name in HOOKS})
        children = {name: None if each is None else self.of(each) for name, each in module._modules.items()}
        # In evaluation bitsandbytes packs the codes of a base on a CPU in another way, in place.
        made.__dict__.update(_modules=children, training=self._training or is_base)
        return made

    def _noisy(self, weight: torch.Tensor | None) -> torch.Tensor | None:
        if weight is None or weight.dtype not in _FLOATS:
            return _cloned(weight)
        if id(weight) not in self._made:
            device = weight.device
            if device not in self._generators:
                self._generators[device] = torch.Generator(device).manual_seed(0)
            noise = torch.randn(weight.shape, generator=self._generators[device], device=device, dtype=torch.float32)
            size = weight.shape[-1] if weight.dim() else 1
            self._made[id(weight)] = (weight.detach() + noise / max(size, 1) ** 0.5).to(weight.dtype)
        return self._made[id(weight)]


def _cloned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _own(value: Any) -> Any:
    """An attribute of a copy, such that a forward of the copy does not change that of the module."""
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if type(value) is dict:
        return {key: _own(each) for key, each in value.items()}
    if type(value) is list:
        return [_own(each) for each in value]
    if isinstance(value, torch.Tensor | nn.Module) or callable(value):
        return value
    try:
        return copy.copy(value)
    except Exception:  # of another library's object
        return value
