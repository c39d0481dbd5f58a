"""LitGPT's LoRA layers, by their structure: `linear`, `lora_A`, `lora_B`, `scaling`, and dropout.

    LoRALinear       linear(x) + dropout(x) @ A^T @ B^T * scaling
    LoRAQKVLinear    the same for each of q, k and v that has an adapter, whose A and B lie one below the other

Ours is the operator of PEFT's layers (`kernels/lora`). For q, k and v it is one layer too: with B block-diagonal, the
product with A of each is added to its own features. So it saves x once, and nothing of the size of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.kernels.lora.lora import LoRALayer, lora_linears
from liger_trainer.patching.as_written import is_operand, is_plain_linear
from liger_trainer.patching.inputs import ADAPTER
from liger_trainer.patching.lora.operands import adapter, is_plain_dropout
from liger_trainer.patching.probe import Probe, Proof, dummy_module, projection
from liger_trainer.patching.report import Finding, proved, reason_to_leave
from liger_trainer.patching.side_effects import run_part
from liger_trainer.patching.trial import Agreement, Trial

_RANK, _FEATURES = 3, 24  # of the dummy module: its rank, and the features of its input and of a head
_READ = ("linear", "lora_dropout", "scaling", "merged", "enable_lora", "qkv_shapes")  # at each call
_NO_DROPOUT = nn.Identity()  # where LitGPT has a function that returns its argument


def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward that is bound to a LoRA layer of LitGPT's."""
    layer = _layer(self, x)
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
    agreement = probe.once(key, _compare, module, enable_lora, probe)
    return proved("lora", target, module, Proof("lora_linear", forward, agreement, _READ))


def _layer(module: Any, x: torch.Tensor) -> LoRALayer | None:
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


def _compare(module: nn.Module, enable_lora: tuple[bool, ...], probe: Probe) -> Agreement:
    """On a dummy with 2 heads, q, k and v of which have the same key, where `module` is for q, k and v."""
    outputs, adapters = 4 * _FEATURES, sum(enable_lora) or 1
    shapes = [q for q, has in zip((2 * _FEATURES, _FEATURES, _FEATURES), enable_lora) if has] or [outputs]
    tensors = [probe.randn(4, 16, _FEATURES).cpu()]
    for shape in ((outputs, _FEATURES), (adapters * _RANK, _FEATURES), (sum(shapes), _RANK)):
        tensors.append(probe.randn(*shape).cpu() * 0.25)
    attributes: dict[str, Any] = {"r": _RANK, "merged": False}
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

    return Trial(on(type(module).forward), tensors, ADAPTER).prove(on(forward))
