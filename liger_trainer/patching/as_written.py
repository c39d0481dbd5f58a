"""When a patched module runs its class's own code, to which our forward was proved equal.

A proof holds for the module as it was: its class, its plain attributes, and the children that our forward computes
without calling them, such as an activation. `records.py` notes all of these where a forward is bound, and each call
compares them by identity. Where one of them is another now, the proof says nothing, and the class's own forward runs.
So it does where such a child has a hook, which only a call of the child would run, and inside the transforms of
`torch.func`, which our operators do not support.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.compat.hooks import is_call_hooked
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import FUNCTION_TRANSFORMS, MODULE_CONTENTS
from liger_trainer.head.forward import never_a_frame
from liger_trainer.head.step import current_step
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.linears import linears
from liger_trainer.kernels.runtime import TRITON_DEVICES
from liger_trainer.patching.reads import MISSING
from liger_trainer.patching.records import RECORD

require(FUNCTION_TRANSFORMS)
require(MODULE_CONTENTS)

# Weak references, because a forward bound over another library's refers to that one, and so to a module.
bound_functions: weakref.WeakSet[Callable] = weakref.WeakSet()

_LINEAR_FORWARD = nn.Linear.forward
_PLAIN = (torch.Tensor, nn.Parameter)


class Precisions(NamedTuple):
    """Where a proof, which is in float32 and bfloat16, holds as well.

    Args:
        autocast: Whether it holds under autocast.
        fp16: Whether it holds in float16, where large numbers overflow.
    """

    autocast: bool = True
    fp16: bool = True

    @property
    def remark(self) -> str:
        """What the report says of a kernel that is not used everywhere."""
        return "" if self.autocast else "under autocast its class's own code runs"


EVERY_PRECISION = Precisions()


def runs_ours(x: torch.Tensor, precisions: Precisions = EVERY_PRECISION) -> bool:
    """Whether our forward runs for `x`, because the proof holds in its precision.

    The class's own code takes fewer steps in a generation on a device without kernels, such as the CPU, and runs there.
    The forward of a reference model is no generation, and has to round as the policy's forward does.
    """
    may_generate = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    if may_generate and current_step().generates and x.device.type not in TRITON_DEVICES:
        return False
    if precisions.autocast and precisions.fp16:
        return True
    autocast = torch.is_autocast_enabled(x.device.type)
    if autocast and not precisions.autocast:
        return False
    dtype = torch.get_autocast_dtype(x.device.type) if autocast and x.dtype == torch.float32 else x.dtype
    return precisions.fp16 or dtype != torch.float16


def is_bound_by_us(module: nn.Module) -> bool:
    """Whether [`bind_forward`] bound this instance's forward; a wrapper may have that of the module inside."""
    bound = module.__dict__.get("forward")
    return is_ours(getattr(bound, "__func__", None)) and getattr(bound, "__self__", None) is module


def is_ours(forward: Callable | None) -> bool:
    """Whether `forward` is a function that [`bind_forward`] has bound to some instance."""
    return forward in bound_functions


# ---------------------------------------------------------------------------------------------------------------------
# Whether a module still is what was proved
# ---------------------------------------------------------------------------------------------------------------------


def while_proved(forward: Callable) -> Callable:
    """`forward` where a module is as it was proved, else that of its class; the same function for the same `forward`.

    It has a code object of its own, because the compiler counts how often each is compiled.
    """
    known = getattr(forward, "while_proved", None)
    if known is not None and known.__wrapped__ is forward:  # `functools.wraps` copies attributes
        return known

    @functools.wraps(forward)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_as_proved(self):
            return forward(self, *args, **kwargs)
        return type(self).forward(self, *args, **kwargs)

    code: types.CodeType = guarded.__code__  # type: ignore[attr-defined]
    guarded.__code__ = code.replace(co_name=f"{forward.__name__}_while_proved")  # type: ignore[attr-defined]
    forward.while_proved = guarded  # type: ignore[attr-defined]
    return guarded


def is_as_proved(module: nn.Module) -> bool:
    """Whether `module` is what it was when it was recorded, so that our forward may run.

    A change is said once. The result is False without a warning inside a transform of `torch.func`, and where a hook
    waits for the call of a child that our forward does not call.
    """
    record = module.__dict__.get(RECORD)
    if record is None or torch._C._are_functorch_transforms_active():
        return False
    own, shared, read = record
    if own.parts[0].owner is not module:  # of a shallow copy
        return False
    for parts, used in (own, shared):
        for owner, forward, attributes, absent, contents in parts:
            held = owner.__dict__
            if owner is not module and is_call_hooked(owner):
                return False
            if type(owner).forward is not forward:
                return _is_changed(module, owner, "forward")
            for name, value in attributes:
                if held.get(name) is not value and _differ(held.get(name), value):
                    return _is_changed(module, owner, name)
            for name in absent:
                if name in held or name in held["_parameters"] or name in held["_buffers"]:
                    return _is_changed(module, owner, name)
            for dictionary, pairs in contents:
                for name, value in pairs:
                    if held[dictionary].get(name) is not value:
                        return _is_changed(module, owner, name)
        for owner, others, containers in used:
            for other, name, value in others:
                try:
                    found = getattr(other, name)
                except Exception:  # what is not there, or a property that raises
                    found = MISSING
                if found is not value and _differ(found, value):
                    return _is_changed(module, owner, _said(other, name, found, value))
            for name, container, value in containers:
                if _differ(container, value):
                    return _is_changed(module, owner, name)
    for function, name, value in read:
        if function.__globals__.get(name) is not value:
            return _is_changed(module, None, name)
    return True


never_a_frame(is_as_proved)  # it has no operators


def _said(owner: Any, name: str, found: Any, value: Any) -> str:
    """What a message calls an attribute that is another now."""
    if name == "__dict__" and isinstance(found, dict):
        return next((key for key in {**value, **found} if found.get(key, owner) is not value.get(key, owner)), name)
    if isinstance(owner, types.CellType):
        return "nonlocal"
    return owner.__name__ if isinstance(owner, types.FunctionType) else name


def _differ(one: Any, other: Any) -> bool:
    """Whether two objects are unequal, or cannot be compared, such as tensors."""
    if isinstance(other, functools.partial):
        same = isinstance(one, functools.partial) and one.func is other.func
        return not (same and one.args == other.args and one.keywords == other.keywords)
    if isinstance(other, types.MethodType):
        same = isinstance(one, types.MethodType) and one.__func__ is other.__func__
        return not (same and one.__self__ is other.__self__)
    try:
        return bool(one != other)
    except Exception:
        return True


def _is_changed(module: nn.Module, owner: nn.Module | None, name: str) -> bool:
    """False, after a warning that says what has been changed."""
    of_owner = "" if owner is None or owner is module else f" of its {type(owner).__name__}"
    _warn(type(module).__name__, name, of_owner)
    return False


@torch.compiler.assume_constant_result  # a trace runs it
def _warn(kind: str, name: str, of_owner: str) -> None:
    warn_once(
        f"changed {kind} {name}{of_owner}",
        f"`{name}`{of_owner} has been changed since liger_trainer patched this {kind}, so the class's own forward "
        "runs, without our kernel. Call liger_trainer.apply_liger_kernel(model) again after the last change. (Shown "
        "once.)",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Layers that need not be called
# ---------------------------------------------------------------------------------------------------------------------


_WORTH_IT = 2**22  # elements; adding two smaller tensors takes a GPU less time than the host needs for the difference


def is_plain_linear(module: Any, x: torch.Tensor | None, classes: tuple[type, ...] = (nn.Linear,)) -> bool:
    """Whether `module` is a linear layer that need not be called: without hooks, shards or quantisation.

    Args:
        module: The layer.
        x: Input of the layer; None asks only for the code that a call runs, whatever its parameters are.
        classes: The classes of linear layers that it may be of.
    """
    if type(module) not in classes or nn.Linear.forward is not _LINEAR_FORWARD or not is_unhooked(module):
        return False
    return x is None or (is_operand(module.weight, x) and (module.bias is None or is_operand(module.bias, x)))


def is_unhooked(module: nn.Module) -> bool:
    """Whether a call of `module` runs nothing but the forward of its class or ours.

    FSDP and ZeRO-3 gather weights in hooks of a module; FLOP counters and tracers register global hooks.
    """
    if is_call_hooked(module):
        return False
    return "forward" not in module.__dict__ or (is_bound_by_us(module) and is_as_proved(module))


def is_operand(parameter: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a linear layer would multiply `x` by `parameter`, as they are or both cast by autocast."""
    if type(parameter) not in _PLAIN or not parameter.is_floating_point() or parameter.device != x.device:
        return False
    if parameter.dtype == x.dtype:
        return True
    return torch.is_autocast_enabled(x.device.type) and torch.float64 not in (parameter.dtype, x.dtype)


def project(x: torch.Tensor, *layers: Any) -> tuple[torch.Tensor, ...]:
    """What `layers`, modules, give of `x` (..., in_features).

    Layers with adapters, hooks, quantised weights or another forward are called one by one.
    """
    together = x.numel() >= _WORTH_IT and x.requires_grad and torch.is_grad_enabled()
    if not together or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return tuple(layer(x) for layer in layers)
    if not all(is_plain_linear(layer, x) and "forward" not in layer.__dict__ for layer in layers):
        return tuple(layer(x) for layer in layers)
    return linears(x, [(layer.weight, layer.bias) for layer in layers])
