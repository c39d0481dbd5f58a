"""LoRA layers, of PEFT and of LitGPT: `base_layer(x) + lora_B(lora_A(dropout(x))) * scaling`.

PEFT runs them as separate layers on a copy of x in the adapters' dtype, which is saved for the backward: fp32 in a bf16
model, since PEFT casts adapters to fp32 for the optimizer. Ours is one operator that saves x as it is (`kernels/lora`).
In patched gated MLPs, gate and up are one such operator and the down projection another (`mlps.py`); queries, keys
and values are one if the attention computes them from one tensor (`attention.py`). The base layer may be plain, one
of bitsandbytes' in 4 bits or in fp8 (`low_bit.py`); with any other, PEFT's own forward runs.

Products are in the dtype of x, as under autocast. Without autocast PEFT multiplies fp32 adapters with an fp32 copy of
x, which is more exact, and is the copy that this avoids.

The proof runs both forwards on a dummy module of plain linear layers on the CPU, where fp32 products are fp32. For a
base layer in 4 bits it also compares our dequantised values with bitsandbytes'. A base layer in fp8 is ours, and so is
a packed one (`liger_trainer/packed/modules.py`).

LitGPT's are known by their structure: `linear`, `lora_A`, `lora_B`, `scaling`, and dropout::

    LoRALinear       linear(x) + dropout(x) @ A^T @ B^T * scaling
    LoRAQKVLinear    the same for each of q, k and v that has an adapter, whose A and B lie one below the other

Ours is the operator of PEFT's layers. For q, k and v it is one layer too: with B block-diagonal, the product with A of
each is added to its own features. So it saves x once, and nothing of the size of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.bitsandbytes import FOUR_BIT_LAYERS
from liger_trainer.compat.private import require
from liger_trainer.kernels.lora.lora import LoRALayer, lora_linears
from liger_trainer.packed.modules import PackedLinear
from liger_trainer.patching.as_written import is_operand, is_plain_linear
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.codes import is_code
from liger_trainer.patching.inputs import ADAPTER, MLP
from liger_trainer.patching.lora.attention import shared_result
from liger_trainer.patching.lora.low_bit import Fp8Linear, is_linear_4bit, layout_of, reads_as_bitsandbytes
from liger_trainer.patching.lora.operands import (
    active_adapters,
    adapted_layer,
    adapter,
    has_known_adapters,
    is_lora_linear,
    is_plain_dropout,
)
from liger_trainer.patching.probe import Probe, Proof, dummy_module, projection
from liger_trainer.patching.report import SWITCHED_OFF, Finding, proved, reason_to_leave
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import Agreement, Trial

_SIZES = (16, 24, 3)  # input and output features of the dummy module, and the rank of its first adapter


def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward that is bound to a LoRA layer."""
    if args or kwargs:
        return type(self).forward(self, x, *args, **kwargs)
    shared = shared_result(self, x)
    if shared is not None:
        return shared
    layer = adapted_layer(self, x)
    return type(self).forward(self, x) if layer is None else lora_linears(x, [layer])[0]


def find_lora(module: Any, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it is one of PEFT's LoRA layers on a linear layer, else None."""
    kind = type(module)
    if kind.__module__.startswith("peft.tuners.lora.") and "Linear" in kind.__name__:
        target = f"lora.{kind.__name__}"
        reason = _obstacle(module) if enabled("lora") else SWITCHED_OFF
        if reason:
            return Finding("lora", target, module, reason=reason)
        agreement = _proof(module, probe)
        kernel = f"lora_linear{_kind_of_base(module.base_layer)}"
        return proved("lora", target, module, Proof(kernel, forward, agreement, live=None))
    return None


def _kind_of_base(base: nn.Module) -> str:
    if isinstance(base, Fp8Linear | PackedLinear):
        return " (fp8)" if isinstance(base, Fp8Linear) else f" ({base.format})"
    return " (4 bits)" if is_linear_4bit(base) else ""


def _obstacle(module: Any) -> str:
    """Why `module` is left alone; empty if nothing prevents the proof."""
    if not is_lora_linear(module):
        return "its base layer is of another kind, quantised or sharded; PEFT's own forward runs"
    if not has_known_adapters(module):
        return "the installed PEFT keeps its adapters in another way; PEFT's own forward runs"
    if reason := reason_to_leave(module, is_enabled=True):
        return reason
    base = type(module.base_layer)
    if is_linear_4bit(module.base_layer):
        require(FOUR_BIT_LAYERS)
    elif base not in (nn.Linear, Fp8Linear, PackedLinear):
        return f"its base layer is a {base.__name__}, not a plain nn.Linear; PEFT's own forward runs"
    foreign = overriding_forward(module.base_layer)
    if foreign is not None:  # such as a quantisation's; what it computes is not W x
        return f"the forward of its base layer is overridden by {foreign}; PEFT's own forward runs"
    if base is nn.Linear and is_code(module.base_layer.weight):
        return f"the weight of its base layer holds codes ({module.base_layer.weight.dtype}); PEFT's own forward runs"
    variants = {type(variant).__name__ for variant in module.lora_variant.values()}
    if variants and len(module.lora_variant) == len(module.lora_A):
        return f"its adapters are of another kind ({', '.join(sorted(variants))}); PEFT's own forward runs"
    return ""


def _proof(module: Any, probe: Probe) -> Agreement:
    names = [name for name in active_adapters(module) if name not in module.lora_variant]
    scalings = tuple(module.scaling[name] for name in names)
    base: Any = module.base_layer
    layout = layout_of(base) if is_linear_4bit(base) else None
    key = ("lora", type(module).forward, tuple(names), scalings, layout)
    return probe.once(key, _compare, module, names, layout, probe)


def _compare(module: nn.Module, names: list[str], layout: tuple[str, int, bool] | None, probe: Probe) -> Agreement:
    inputs, outputs, rank = _SIZES
    shapes = [(4, 16, inputs), (outputs, inputs)]
    for index in range(len(names)):
        shapes += [(rank + index, inputs), (outputs, rank + index)]
    tensors = [probe.randn(*shapes[0]).cpu(), *(probe.randn(*shape).cpu() * 0.25 for shape in shapes[1:])]

    def on(forward: Callable) -> Callable:
        def computation(
            x: torch.Tensor, weight: torch.Tensor, *adapters: torch.Tensor, training: bool = True
        ) -> torch.Tensor:
            return run_part(forward, _dummy(module, names, weight, adapters, training), x)

        return computation

    agreement = Trial(on(type(module).forward), tensors, MLP).prove(on(forward))
    if agreement.equal and layout is not None and not reads_as_bitsandbytes(layout, probe):
        return Agreement(float("inf"), reason="this bitsandbytes stores its 4 bits in another way")
    return agreement


def _dummy(
    module: nn.Module, names: list[str], weight: torch.Tensor, adapters: tuple[torch.Tensor, ...], training: bool
) -> Any:
    """`module` with other weights, and with its adapters in use."""
    children = {
        "base_layer": _linear(weight),
        "lora_A": nn.ModuleDict({name: _linear(a) for name, a in zip(names, adapters[::2])}),
        "lora_B": nn.ModuleDict({name: _linear(b) for name, b in zip(names, adapters[1::2])}),
        "lora_dropout": nn.ModuleDict({name: nn.Identity() for name in names}),
    }
    dummy = dummy_module(module, {}, children, training)
    dummy.__dict__.update(merged_adapters=[], _disable_adapters=False, _active_adapter=names)
    return dummy


def _linear(weight: torch.Tensor) -> nn.Module:
    return projection(weight, nn.Linear)


_LITGPT_RANK, _FEATURES = 3, 24  # of the dummy module: its rank, and the features of its input and of a head
_LITGPT_READ = ("linear", "lora_dropout", "scaling", "merged", "enable_lora", "qkv_shapes")  # at each call
_NO_DROPOUT = nn.Identity()  # where LitGPT has a function that returns its argument


def litgpt_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward that is bound to a LoRA layer of LitGPT's."""
    layer = _litgpt_layer(self, x)
    return type(self).forward(self, x) if layer is None else lora_linears(x, [layer])[0]


def find_litgpt_lora(module: nn.Module, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it has the structure of LitGPT's LoRA layers, else None."""
    if {"lora_A", "lora_B"} != module._parameters.keys() or not isinstance(getattr(module, "linear", None), nn.Linear):
        return None
    target = type(module).__name__
    reason = reason_to_leave(module, enabled("lora"))
    if reason:
        return Finding("lora", target, module, reason=reason)
    enable_lora = tuple(getattr(module, "enable_lora", ()))
    key = ("litgpt lora", type(module).forward, module.scaling, enable_lora)
    agreement = probe.once(key, _compare_litgpt, module, enable_lora, probe)
    return proved("lora", target, module, Proof("lora_linear", litgpt_forward, agreement, _LITGPT_READ))


def _litgpt_layer(module: Any, x: torch.Tensor) -> LoRALayer | None:
    """The operands of `module` for `x`; None if its own forward must run."""
    linear, a, b = module.linear, module.lora_A, module.lora_B
    dropout = module.lora_dropout if isinstance(module.lora_dropout, nn.Module) else _NO_DROPOUT
    if module.merged or not (is_plain_linear(linear, x) and is_operand(a, x) and is_operand(b, x)):
        return None
    if not is_plain_dropout(dropout) or isinstance(module.scaling, torch.Tensor):
        return None
    if hasattr(module, "enable_lora"):
        b = _block_diagonal(module, b)
    return LoRALayer(linear.weight, linear.bias, (adapter(a, b, module.scaling, dropout, x),))


def _block_diagonal(module: Any, b: torch.Tensor) -> torch.Tensor:
    """B of q, k and v, (their features, the ranks of those with an adapter): zero where the adapter is another's."""
    size, groups = module.head_size * module.n_head, module.head_size * module.n_query_groups
    parts = iter(b.split(module.qkv_shapes))
    sizes = (size, groups, module.linear.out_features - size - groups)
    return torch.block_diag(
        *(next(parts) if has else b.new_empty(features, 0) for features, has in zip(sizes, module.enable_lora))
    )


def _compare_litgpt(module: nn.Module, enable_lora: tuple[bool, ...], probe: Probe) -> Agreement:
    """On a dummy with 2 heads, q, k and v of which have the same key, where `module` is for q, k and v."""
    outputs, adapters = 4 * _FEATURES, sum(enable_lora) or 1
    shapes = [q for q, has in zip((2 * _FEATURES, _FEATURES, _FEATURES), enable_lora) if has] or [outputs]
    tensors = [probe.randn(4, 16, _FEATURES).cpu()]
    for shape in ((outputs, _FEATURES), (adapters * _LITGPT_RANK, _FEATURES), (sum(shapes), _LITGPT_RANK)):
        tensors.append(probe.randn(*shape).cpu() * 0.25)
    attributes: dict[str, Any] = {"r": _LITGPT_RANK, "merged": False}
    if enable_lora:
        attributes |= {"head_size": _FEATURES, "n_head": 2, "n_query_groups": 1, "qkv_shapes": shapes}

    def on(forward: Callable) -> Callable:
        def computation(
            x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, training: bool = True
        ) -> torch.Tensor:
            children = {"linear": projection(weight, nn.Linear)}
            if isinstance(module.lora_dropout, nn.Module):
                children["lora_dropout"] = nn.Dropout(0.0)
            dummy = dummy_module(module, {"lora_A": a, "lora_B": b}, children, training)
            dummy.__dict__.update(attributes)
            return run_part(forward, dummy, x)

        return computation

    return Trial(on(type(module).forward), tensors, ADAPTER).prove(on(litgpt_forward))
