"""What one of PEFT's LoRA layers computes at the time of a call, as the operands of our operators.

PEFT lets a user merge, disable, add and switch adapters, hang hooks on any part, and replace parts. So every call asks
whether the layer is a plain product with plain adapters; where it is not, its own forward runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.lora.lora import LoRA, LoRALayer
from liger_trainer.kernels.lora.nf4 import NF4Weight
from liger_trainer.patching.binding import is_bound_by_us
from liger_trainer.patching.lora.quantized import is_linear_4bit, nf4_weight_of
from liger_trainer.tiling.summed_linear import LinearOfPiece

_PLAIN = (torch.Tensor, nn.Parameter)
_LINEARS = (nn.Linear, LinearOfPiece)  # the latter in a tiled MLP, for gradients of layers that are called
_LORA_LINEARS = {("peft.tuners.lora.layer", "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")}


def is_lora_linear(module: nn.Module) -> bool:
    """Whether `module` is exactly PEFT's LoRA layer for linear layers, also in 4 bits; subclasses compute otherwise."""
    kind = type(module)
    return (kind.__module__, kind.__name__) in _LORA_LINEARS


def adapted_layers(x: torch.Tensor, *modules: nn.Module) -> list[LoRALayer] | None:
    """What `modules` compute of `x`, without calling them; None if one must be called, or none has an adapter.

    Dropout masks are drawn here, in the order in which the modules would draw them.
    """
    if not all(is_unseen(module) for module in modules):
        return None
    adapted = [is_lora_linear(module) for module in modules]
    if not any(adapted):
        return None
    return _layers(x, modules)


def adapted_layer(module: nn.Module, x: torch.Tensor) -> LoRALayer | None:
    """What the LoRA layer `module`, which is being called, computes of `x`; None if its own forward must."""
    layers = _layers(x, [module])
    return None if layers is None else layers[0]


def _layers(x: torch.Tensor, modules: Sequence[Any]) -> list[LoRALayer] | None:
    adapted = [is_lora_linear(module) for module in modules]
    bases = [_base(m.base_layer, x, _drops(m)) if has else _base(m, x) for m, has in zip(modules, adapted)]
    if not all(_has_plain_adapters(module, x) for module, has in zip(modules, adapted) if has):
        return None
    known = [base for base in bases if base is not None]
    if len(known) < len(bases):
        return None
    return [
        base._replace(adapters=_adapters(module, x)) if has else base
        for module, base, has in zip(modules, known, adapted)
    ]


def _base(module: Any, x: torch.Tensor, drops: bool = False) -> LoRALayer | None:
    """A layer without its adapters, which may have dropout; None if its weight may not be used without calling it."""
    weight: torch.Tensor | NF4Weight | None = None
    if _is_plain(module, x, _LINEARS):
        weight = module.weight
    elif is_linear_4bit(module) and is_unseen(module):
        weight = nf4_weight_of(module, x, drops)
    return None if weight is None else LoRALayer(weight, module.bias)


def is_plain_linear(module: Any, x: torch.Tensor) -> bool:
    """Whether `module` is a product with a weight that may be used without calling it: no hook, shard, quantisation."""
    return _is_plain(module, x, (nn.Linear,))


def _is_plain(module: Any, x: torch.Tensor, classes: tuple[type, ...]) -> bool:
    if type(module) not in classes or not is_unseen(module):
        return False
    return is_operand(module.weight, x) and (module.bias is None or is_operand(module.bias, x))


def active_adapters(module: Any) -> list[str]:
    """The names of the adapters that take part, in order."""
    return [name for name in module.active_adapters if name in module.lora_A]


def is_unseen(module: nn.Module) -> bool:
    """Whether nobody but the caller takes part in a call of `module`.

    FSDP and ZeRO-3 gather weights in hooks of a module; FLOP counters and tracers put theirs on all modules.
    """
    if nn.modules.module._has_any_global_hook():
        return False
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    return "forward" not in module.__dict__ or is_bound_by_us(module)


def is_operand(parameter: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a linear layer would multiply `x` with `parameter`, as they are or as autocast casts both."""
    if type(parameter) not in _PLAIN or not parameter.is_floating_point() or parameter.device != x.device:
        return False
    autocast = torch.is_autocast_enabled(x.device.type) and torch.float64 not in (parameter.dtype, x.dtype)
    return autocast or parameter.dtype == x.dtype


def _drops(module: Any) -> bool:
    """Whether dropout acts before an adapter of `module`."""
    return any(_is_active(module.lora_dropout[name]) for name in active_adapters(module))


def _is_active(dropout: nn.Module) -> bool:
    return type(dropout) is nn.Dropout and dropout.training and dropout.p > 0


def _has_plain_adapters(module: Any, x: torch.Tensor) -> bool:
    if type(x) not in _PLAIN:
        return False
    if module.disable_adapters or module.merged or not getattr(module, "cast_input_dtype_enabled", True):
        return False
    names = active_adapters(module)
    return bool(names) and all(is_plain_adapter(module, name, x) for name in names)


def is_plain_adapter(module: Any, name: str, x: torch.Tensor) -> bool:
    """Whether the adapter `name` of `module` is two plain matrices, which may be used without calling them."""
    if name in module.lora_variant:  # DoRA and its kin
        return False
    a, b, dropout = (children[name] for children in (module.lora_A, module.lora_B, module.lora_dropout))
    for matrix in (a, b):
        if type(matrix) not in _LINEARS or matrix.bias is not None or not is_unseen(matrix):
            return False
        weight = matrix.weight
        # PEFT casts x to the dtype of the adapter, whatever it is.
        if type(weight) not in _PLAIN or not weight.is_floating_point() or weight.device != x.device:
            return False
    if not is_unseen(dropout):
        return False
    return type(dropout) is nn.Identity or (type(dropout) is nn.Dropout and not dropout.inplace and dropout.p < 1)


def _adapters(module: Any, x: torch.Tensor) -> tuple[LoRA, ...]:
    adapters = []
    for name in active_adapters(module):
        dropout, scaling, mask = module.lora_dropout[name], module.scaling[name], None
        if _is_active(dropout):
            mask = torch.native_dropout(x.detach(), dropout.p, True)[1]
            scaling = scaling / (1 - dropout.p)
        a, b = module.lora_A[name].weight, module.lora_B[name].weight
        adapters.append(LoRA(a, b, scaling, mask))
    return tuple(adapters)
