"""What a forward leaves behind besides its result, such as a router's `self.aux_loss`: our forwards leave nothing.

A forward that assigns an attribute, writes to a buffer, or appends to a list has to run as it is, because something
else may read that. [`run_part`] compares what a module and its children hold before and after a run: attributes and
what is in them, buffers, attributes of the class, and the globals that the forward reads.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.rebound import used_globals
from liger_trainer.head.lm_head import version_of
from liger_trainer.patching.reads import CONTAINERS, holds_arrays, reads_of

_PLAIN = (type(None), bool, int, float, str)
# Which nobody assigns: every class has many.
_CODE = (type, types.ModuleType, types.FunctionType, property, classmethod, staticmethod)
_NO_PARAMETER = "which are neither a parameter nor a buffer and may change in place"
_OF_TORCH = set(nn.Module().__dict__) - {"training", "_parameters", "_buffers"}


class SideEffectError(Exception):
    """Says what a forward changed, as the reason in the report."""


def run_part(forward: Callable, module: nn.Module, *inputs: torch.Tensor | None) -> Any:
    """The result of ``forward(module, *inputs)``.

    Raises:
        SideEffectError: If the module, a child, its class or a global of `forward` holds something else afterwards, or
            if the forward reads tensors that are neither parameters nor buffers: no call could see that they change.
            Lists, dictionaries and sets of the class and of globals get back what they held before.
    """
    held = dict(_held(forward, module, refuse=True))
    before = {name: _contents(value) for name, value in held.items()}
    # Also keeps what they held alive, so that nothing new gets the identity of something old.
    copies = {name: value.copy() for name, value in held.items() if type(value) in CONTAINERS}
    result = forward(module, *inputs)
    after = {name: _contents(value) for name, value in _held(forward, module)}
    if before != after:
        changed = [name for name in {**before, **after} if before.get(name, module) != after.get(name, module)]
        for name in copies.keys() & set(changed):
            held[name].clear()
            (held[name].update if hasattr(held[name], "update") else held[name].extend)(copies[name])
        raise SideEffectError(f"its forward also sets {', '.join(changed)}, which others may read")
    return result


def copies_of_containers(attributes: dict[str, Any]) -> dict[str, Any]:
    """`attributes` with copies of lists, dictionaries and sets, so that a dummy's forward does not change a model's."""
    return {name: value.copy() if type(value) in CONTAINERS else value for name, value in attributes.items()}


def _held(forward: Callable, module: nn.Module, refuse: bool = False) -> Iterator[tuple[str, Any]]:
    """Everything that a run of `forward` on `module` may change, by a name for the report.

    Args:
        forward: A function of the module and its inputs.
        module: The module.
        refuse: Raise for tensors in attributes and globals that it reads.
    """
    for path, part in module.named_modules():
        if type(part).__module__.startswith("liger_trainer."):
            continue
        prefix = f"{path}." if path else ""
        for name, value in part.__dict__.items():
            if name in ("_parameters", "_buffers"):
                yield from ((prefix + key, tensor) for key, tensor in value.items())
            elif name not in _OF_TORCH:
                reads = reads_of(type(part)) if refuse and type(value) not in _PLAIN and holds_arrays(value) else None
                if reads is not None and (name in reads.names or name in reads.strings):
                    raise SideEffectError(f"its forward reads the numbers of its {name}, {_NO_PARAMETER}")
                yield prefix + name, value
        for cls in type(part).__mro__:
            if cls is not object and not cls.__module__.startswith("torch."):
                for name, value in vars(cls).items():
                    if not isinstance(value, _CODE) and not name.startswith("__"):
                        yield f"{cls.__name__}.{name}", value
    while isinstance(forward, types.FunctionType):
        for name, value in used_globals(forward).items():
            if not isinstance(value, _CODE):
                if refuse and type(value) not in _PLAIN and holds_arrays(value):
                    raise SideEffectError(f"its forward reads the numbers of the global {name}, {_NO_PARAMETER}")
                yield f"the global {name}", value
        forward = getattr(forward, "__wrapped__", None)  # type: ignore[assignment]


def _contents(value: Any) -> Any:
    """What is equal as long as `value` is the same object and holds the same ones."""
    kind = type(value)
    if kind in _PLAIN:
        return id(value) if kind is float else value  # NaN is another number than itself
    if isinstance(value, torch.Tensor):
        return id(value), version_of(value)
    inside: Any = ()
    if isinstance(value, (list, tuple, set, collections.deque)):
        inside = value
    elif not isinstance(value, nn.Module):
        of_object = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        inside = of_object.values() if isinstance(of_object, dict) else ()
    return id(value), *map(id, inside)
