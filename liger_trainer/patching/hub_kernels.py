"""Hugging Face's `kernels` library and our forwards: those that a model keeps, and those that it asks for.

A model with `use_kernels` gives the library's forwards to its instances whenever it changes between training and
evaluation. It would give them to ours too, so it is kept from that. And it may ask for ours:
`liger_trainer/integrations/hub_kernels/` has layers for it.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from liger_trainer.configs.kernel_config import KernelConfig
from liger_trainer.head.warn_once import warn_once
from liger_trainer.patching.as_written import is_as_proved, is_bound_by_us
from liger_trainer.patching.binding import bound_modules
from liger_trainer.patching.mlps import find_gated_mlp
from liger_trainer.patching.norms import find_norm
from liger_trainer.patching.probe import Probe, dummy_module
from liger_trainer.patching.records import record
from liger_trainer.patching.rotations import prove_rotation

# ---------------------------------------------------------------------------------------------------------------------
# Forwards that a model keeps
# ---------------------------------------------------------------------------------------------------------------------


def keep_forwards(model: nn.Module) -> None:
    """Makes every model of transformers in `model` keep our forwards when it takes those of the `kernels` library."""
    if any(hasattr(type(module), "kernel_layer_name") for module in bound_modules(model)):
        for module in model.modules():
            if hasattr(type(module), "set_use_kernels"):
                module.set_use_kernels = types.MethodType(set_use_kernels, module)  # type: ignore[assignment]


def release_forwards(model: nn.Module) -> None:
    """Takes [`keep_forwards`] back."""
    for module in model.modules():
        method = module.__dict__.get("set_use_kernels")
        if getattr(method, "__func__", None) is set_use_kernels:
            del module.set_use_kernels


def set_use_kernels(self: Any, *args: Any, **kwargs: Any) -> None:
    """As the class's own, which `train()`, `eval()` and `use_kernels = True` call; it has this name for pickling."""
    ours = {module: module.forward for module in self.modules() if is_bound_by_us(module)}
    try:
        type(self).set_use_kernels(self, *args, **kwargs)
    finally:
        replaced = [module for module, forward in ours.items() if module.forward is not forward]
        for module in replaced:
            module.forward = ours[module]
    if replaced:
        names = ", ".join(sorted({type(module).__name__ for module in replaced}))
        warn_once(
            f"use_kernels {names}",
            f"`use_kernels`: {names} of {type(self).__name__} keep liger_trainer's kernels. To run those of the "
            "`kernels` library there, call liger_trainer.revert_liger_kernel(model) and then "
            "model.set_use_kernels(True). (Shown once.)",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Forwards that a model asks for
# ---------------------------------------------------------------------------------------------------------------------

_proved: weakref.WeakKeyDictionary[nn.Module, Callable] = weakref.WeakKeyDictionary()

Prove = Callable[[nn.Module, Probe], tuple[Callable | None, str]]
"""Our forward for a module of which it gets a dummy, or None and why there is none."""


def proved_forward(module: nn.Module, x: torch.Tensor, prove: Prove) -> Callable:
    """Our forward for `module`, a function of it; its class's own where it computes something else.

    The two are compared at the first call, on the device of its input `x`.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or x.is_meta:
        return type(module).forward
    if module not in _proved or not is_as_proved(module, tell=False):
        with ThreadPoolExecutor(1) as thread:  # where a checkpoint around this call sees nothing of the proof
            forward, reason = thread.submit(_proof, module, x.device, prove).result()
        if forward is None:
            what = f"liger_trainer has no kernel for {_name_of(type(module))}, whose own forward runs: {reason}."
            warn_once(what, f"`use_kernels`: {what} (Shown once.)")
        _proved[module] = forward or type(module).forward
        record(module, _proved[module], ())
    return _proved[module]


def _proof(module: nn.Module, device: torch.device, prove: Prove) -> tuple[Callable | None, str]:
    probe = Probe(device)
    dummy = dummy_module(module, dict(module.named_parameters(recurse=False)), dict(module.named_children()))
    with probe.isolated():
        return prove(dummy, probe)


def _name_of(cls: type) -> str:
    """The class, and the library's name for it, since functions have no other."""
    name = getattr(cls, "kernel_layer_name", None)
    return cls.__qualname__ if name is None else f"{cls.__qualname__} ({name})"


def _enabled(component: str) -> bool:
    return getattr(KernelConfig(), component)


def prove_norm(dummy: nn.Module, probe: Probe) -> tuple[Callable | None, str]:
    """A [`Prove`] for a normalisation."""
    finding = find_norm(dummy, _enabled, probe)
    return (None, "it is no normalisation of rows") if finding is None else (finding.forward, finding.reason)


def prove_mlp(dummy: nn.Module, probe: Probe) -> tuple[Callable | None, str]:
    """A [`Prove`] for a gated MLP."""
    finding = find_gated_mlp(dummy, _enabled, probe)
    return (None, "it is no gated MLP") if finding is None else (finding.forward, finding.reason)


def prove_function(dummy: nn.Module, probe: Probe) -> tuple[Callable | None, str]:
    """A [`Prove`] for a rotary function that the `kernels` library has made a module."""
    _, rotary, agreement, _ = prove_rotation(dummy, probe)
    return None if rotary is None else (lambda _, *operands: rotary(*operands)), agreement.reason
