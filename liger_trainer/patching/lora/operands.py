"""The current weights of a LoRA layer of PEFT's, as operands of our operators.

Users of PEFT may merge, disable, add and switch adapters, register hooks and replace parts at any time. So every call
checks whether the layer is a plain product with plain adapters; if it is not, its own forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from liger_trainer.compat.peft import LORA_LAYERS
from liger_trainer.compat.private import available
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.lora.lora import LoRA, LoRALayer
from liger_trainer.kernels.lora.lora_products import Weight
from liger_trainer.packed.modules import PackedLinear
from liger_trainer.patching.as_written import is_bound_by_us, is_plain_linear, is_unhooked
from liger_trainer.patching.lora.low_bit import Fp8Linear, is_linear_4bit, nf4_weight_of
from liger_trainer.tiling.summed_linear import LinearInTile

PlainAdapter: TypeAlias = tuple[torch.Tensor, torch.Tensor, float, nn.Module]
"""A, B, the scaling and the dropout of an adapter."""

_PLAIN = (torch.Tensor, nn.Parameter)
_LINEARS = (nn.Linear, LinearInTile)  # the latter in a tiled MLP
_LORA_LINEARS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}
_ATTRIBUTES = (
    *("base_layer", "disable_adapters", "merged", "active_adapters"),
    *("lora_A", "lora_B", "lora_dropout", "lora_variant", "scaling"),
)


def is_lora_linear(module: nn.Module) -> bool:
    """Whether `module` is exactly PEFT's LoRA layer for linear layers, 4 bits included; subclasses may differ."""
    kind = type(module)
    return (kind.__module__, kind.__name__) in _LORA_LINEARS


def has_known_adapters(module: nn.Module) -> bool:
    """Whether the LoRA layer `module` keeps its adapters where the PEFT we test with does; warns once if not."""
    missing = [name for name in _ATTRIBUTES if not hasattr(module, name)]
    if missing:
        warn_once(
            "lora attributes",
            f"A {type(module).__name__} of PEFT has no `{missing[0]}`; PEFT's own forward runs for such layers. To run "
            "them as one operator, install the PEFT that liger_trainer is tested with. (Said once.)",
        )
        return False
    return torch.compiler.is_compiling() or available(LORA_LAYERS)  # a trace cannot check it, and the first call has


def adapted_layers(x: torch.Tensor, *modules: nn.Module) -> list[LoRALayer] | None:
    """The operands of `modules` for `x`; None if one of the modules must be called, or if none has an adapter.

    Dropout masks are drawn here, in the order in which the modules would draw them.
    """
    adapted = [module for module in modules if is_lora_linear(module)]
    if not adapted or not all(is_unhooked(module) for module in modules):
        return None
    # What is bound has been found to have them.
    if not all(is_bound_by_us(module) or has_known_adapters(module) for module in adapted):
        return None
    return _layers(x, modules)


def adapted_layer(module: nn.Module, x: torch.Tensor) -> LoRALayer | None:
    """The operands of the LoRA layer `module`, which is being called, for `x`; None if its own forward must run."""
    layers = _layers(x, [module])
    return None if layers is None else layers[0]


def _layers(x: torch.Tensor, modules: Sequence[Any]) -> list[LoRALayer] | None:
    plain = [_plain_layer(module, x) for module in modules]
    known = [each for each in plain if each is not None]
    if len(known) < len(plain):  # before any mask is drawn
        return None
    return [base._replace(adapters=[adapter(*each, x) for each in adapters]) for base, adapters in known]


def _plain_layer(module: Any, x: torch.Tensor) -> tuple[LoRALayer, list[PlainAdapter]] | None:
    """A layer without its adapters, and these; None if the layer must be called."""
    adapters: list[PlainAdapter] = []
    base = module
    if is_lora_linear(module):
        if type(x) not in _PLAIN or module.disable_adapters or module.merged:
            return None
        if not getattr(module, "cast_input_dtype_enabled", True):
            return None
        for name in active_adapters(module):
            plain = plain_adapter(module, name, x)
            if plain is None:
                return None
            adapters.append(plain)
        if not adapters:
            return None
        base = module.base_layer
    layer = _base(base, x, any(_is_active(dropout) for *_, dropout in adapters))
    return None if layer is None else (layer, adapters)


def _base(module: Any, x: torch.Tensor, drops: bool = False) -> LoRALayer | None:
    """A layer without its adapters, which may have dropout; None if it must be called."""
    weight: Weight | None = None
    if is_plain_linear(module, x, _LINEARS):
        weight = module.weight
    elif is_linear_4bit(module) and is_unhooked(module):
        weight = nf4_weight_of(module, x, drops)
    elif type(module) is Fp8Linear and is_unhooked(module) and module.codes.device == x.device:
        weight = module.stored
    elif type(module) is PackedLinear and is_unhooked(module) and module.codes.device == x.device:
        weight = module.operand
    return None if weight is None else LoRALayer(weight, module.bias)


def active_adapters(module: Any) -> list[str]:
    """The names of the active adapters, in order."""
    return [name for name in module.active_adapters if name in module.lora_A]


def _is_active(dropout: nn.Module) -> bool:
    return type(dropout) is nn.Dropout and dropout.training and dropout.p > 0


def plain_adapter(module: Any, name: str, x: torch.Tensor) -> PlainAdapter | None:
    """The adapter `name` of `module`; None if it is more than two plain matrices, and must be called."""
    scaling = module.scaling[name]
    if name in module.lora_variant or isinstance(scaling, torch.Tensor):  # such as DoRA, or a scaling that is trained
        return None
    a, b, dropout = module.lora_A[name], module.lora_B[name], module.lora_dropout[name]
    for matrix in (a, b):
        if not is_plain_linear(matrix, None, _LINEARS) or matrix.bias is not None:
            return None
        weight = matrix.weight
        # Of any dtype: PEFT casts x to that of the adapter.
        if type(weight) not in _PLAIN or not weight.is_floating_point() or weight.device != x.device:
            return None
    return (a.weight, b.weight, scaling, dropout) if is_plain_dropout(dropout) else None


def is_plain_dropout(dropout: nn.Module) -> bool:
    """Whether an adapter's `dropout` need not be called: none at all, or one that [`adapter`] draws."""
    if not is_unhooked(dropout):
        return False
    return type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not dropout.inplace and dropout.p < 1)


def adapter(a: torch.Tensor, b: torch.Tensor, scaling: float, dropout: Any, x: torch.Tensor) -> LoRA:
    """The adapter of A and B, with the mask that its plain `dropout` draws for `x`."""
    if not _is_active(dropout):
        return LoRA(a, b, scaling)
    mask = torch.native_dropout(x.detach(), dropout.p, True)[1]
    return LoRA(a, b, scaling / (1 - dropout.p), mask)
