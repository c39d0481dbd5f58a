"""PEFT's adapters on stacked weights of experts (`target_parameters`), which then run without W + s B A.

PEFT wraps the experts in nested `ParamWrapper` modules, one for each adapted parameter. While the experts run, each
replaces W by W + s B A, which is as large as W and computed at every call. Ours reads the factors of all wrappers and
passes them to our forward of the experts (`experts.py`), whose products add them (`kernels/moe`).

As in `lora/operands.py`, every call checks whether PEFT would compute just that. Merged and disabled adapters, hooks,
sharded weights, parametrisations other than 4 bits and anything unknown are left to PEFT's own forward.

The proof compares s B A from the factors with PEFT's `get_delta_weight`; the experts have a proof of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.peft import LORA_EXPERTS
from liger_trainer.compat.private import available
from liger_trainer.kernels.moe.experts import ExpertLoRA
from liger_trainer.patching.as_written import is_bound_by_us, is_operand, is_unhooked
from liger_trainer.patching.codes import adds_to_codes
from liger_trainer.patching.lora.operands import active_adapters, plain_adapter
from liger_trainer.patching.moe.experts import find_experts, forward_of_ours
from liger_trainer.patching.moe.experts_formula import layout_of
from liger_trainer.patching.moe.quantized_experts import declared_weights, in_few_bits
from liger_trainer.patching.moe.scaled_experts import are_proved
from liger_trainer.patching.probe import Agreement, Probe, Proof, class_of, dummy_module, projection
from liger_trainer.patching.report import SWITCHED_OFF, Finding, proved, reason_to_leave
from liger_trainer.patching.trial import Trial

_SIZES = (3, 16, 24, 4)  # experts, two features and the rank of the dummy module


def forward(self: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The forward that is bound to a `ParamWrapper`."""
    adapted = None if kwargs or not args else _adapted_experts(self, x)  # no choices: every expert runs on every token
    if adapted is None:
        return type(self).forward(self, x, *args, **kwargs)
    run, experts, adapters = adapted
    return run(experts, x, *args, adapters)


def adapted_experts_left_to_peft(model: nn.Module) -> nn.Module | None:
    """Experts in few bits whose adapters PEFT's own forward would run; None if there are none."""
    for module in model.modules():
        if is_param_wrapper(module) and in_few_bits(_unwrapped(module)[1]) and not is_bound_by_us(module):
            return _unwrapped(module)[1]
    return None


def is_param_wrapper(module: nn.Module) -> bool:
    """Whether `module` is exactly PEFT's wrapper of a module with one adapted parameter."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("peft.tuners.lora.layer", "ParamWrapper")


def _unwrapped(module: Any) -> tuple[list[Any], Any]:
    """The nested wrappers, `module` first, and the module inside the last one."""
    wrappers = []
    while is_param_wrapper(module):
        wrappers.append(module)
        module = module.base_layer
    return wrappers, module


def _adapted_experts(
    module: nn.Module, x: torch.Tensor
) -> tuple[Callable, nn.Module, dict[str, list[ExpertLoRA]]] | None:
    """Our forward of the experts in the wrapper `module`, the experts, and their adapters; None if PEFT's must run."""
    wrappers, experts = _unwrapped(module)
    run = forward_of_ours(experts)
    inner = [*wrappers[1:], experts]
    if run is None or not all(is_unhooked(each) for each in inner):
        return None
    adapters, weights = {}, declared_weights(experts)
    for wrapper in wrappers:
        weight = weights.get(wrapper.parameter_name)  # None also while PEFT's own forward parametrises it
        if weight is None or not is_operand(weight, x) or not _has_plain_factors(wrapper, x):
            return None
        adapters[wrapper.parameter_name] = [factors(wrapper, name) for name in active_adapters(wrapper)]
    return run, experts, adapters


def _has_plain_factors(wrapper: Any, x: torch.Tensor) -> bool:
    if wrapper.disable_adapters or wrapper.merged or wrapper.num_experts == 1:
        return False
    return all(plain_adapter(wrapper, name, x) for name in active_adapters(wrapper))


def factors(wrapper: Any, name: str) -> ExpertLoRA:
    """The adapter `name`, which adds ``scaling * b @ a`` to the parameter in its own layout.

    PEFT keeps A as (experts * rank, in) and B as (out, rank * experts).
    """
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    a = a.reshape(wrapper.num_experts, -1, a.shape[1])
    b = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    if not wrapper._did_swap_in_out_features:  # the parameter is (experts, in, out)
        a, b = b.mT, a.mT
    return ExpertLoRA(a, b, wrapper.scaling[name])


def find_adapted_parameter(module: Any, enabled: Callable[[str], bool], probe: Probe) -> Finding | None:
    """The finding for `module` if it is PEFT's wrapper of a module with an adapted parameter, else None."""
    if not is_param_wrapper(module):
        return None
    target = "lora.ParamWrapper"
    reason = _obstacle(module, enabled, probe) if enabled("lora") else SWITCHED_OFF
    if reason:
        return Finding("lora", target, module, reason=reason)
    key = "adapted parameter", type(module).get_delta_weight, module._did_swap_in_out_features
    agreement = probe.once(key, _prove, module, probe)
    return proved("lora", target, module, Proof("moe_experts (adapters)", forward, agreement, live=None))


def _obstacle(module: Any, enabled: Callable[[str], bool], probe: Probe) -> str:
    """Why `module` is left alone; empty if nothing prevents the proof."""
    if not available(LORA_EXPERTS):
        return "the installed PEFT keeps such adapters in another way; PEFT's own forward runs"
    if reason := reason_to_leave(module, is_enabled=True):
        return reason
    if reason := adds_to_codes(module):
        return f"{reason}; a trainer refuses it"
    _, experts = _unwrapped(module)
    finding = find_experts(experts, enabled, probe)
    if finding is None and layout_of(experts) is not None:
        proved = are_proved(experts, probe)
        return "" if proved else f"its experts, {class_of(experts).__name__}, are left alone; PEFT's own forward runs"
    if finding is None:
        return (
            f"{module.parameter_name} of {class_of(experts).__name__} is no weight of experts; PEFT's own forward runs"
        )
    if finding.forward is None:
        return f"its experts, {finding.target}, are left alone; PEFT's own forward runs"
    return ""


def _prove(module: Any, probe: Probe) -> Agreement:
    experts, one, other, rank = _SIZES
    weights = [probe.randn(*shape).cpu() for shape in ((experts * rank, one), (other, rank * experts))]

    def ours(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        adapter = factors(_dummy(module, a, b), "default")
        return adapter.b @ adapter.a * adapter.scaling

    with probe.on_cpu():
        return Trial(lambda a, b: _dummy(module, a, b).get_delta_weight("default"), weights).compare(ours)


def _dummy(module: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    """`module` with one small adapter."""
    experts, one, other, _ = _SIZES
    base = nn.Module()
    sizes = (other, one) if module._did_swap_in_out_features else (one, other)
    base.register_buffer(module.parameter_name, a.new_empty(experts, *sizes))
    children = {
        "base_layer": base,
        "lora_A": nn.ModuleDict({"default": projection(a, nn.Linear)}),
        "lora_B": nn.ModuleDict({"default": projection(b, nn.Linear)}),
    }
    dummy: Any = dummy_module(module, {}, children)
    dummy.__dict__.update(num_experts=experts, scaling={"default": 0.5})
    return dummy
