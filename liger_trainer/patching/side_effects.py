"""What a forward leaves behind besides its result, such as a router's `self.aux_loss`: our forwards leave nothing.

A forward that assigns an attribute, writes to a buffer, or appends to a list has to run as it is, because something
else may read that. [`run_part`] compares what can be reached before and after a run: attributes and buffers of a module
and its children, their classes, and the globals and closures of their functions and of those that these call, with all
that they hold (containers, attributes, slots, bound methods), to any depth. Then everything gets back what it held.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.head.lm_head import version_of
from liger_trainer.patching.reads import (
    CODE_OF_OTHERS,
    CONTAINERS,
    FEW,
    FRAMEWORKS,
    NOT_FOLLOWED,
    WRAPPED,
    WRAPPERS,
    SideEffectError,
    code_reads,
    is_array,
    package_of,
    reads_of,
    slots_of,
)
from liger_trainer.patching.records import arrays_read

_NOT_OF_PARTS = frozenset(nn.Module().__dict__) - {"training"}  # the attributes that every module has for torch
_PLAIN = (type(None), bool, int, float, str)
_MOST = 10_000
# Objects of these modules hold what others put there.
_OPEN = {"argparse", "builtins", "collections", "functools", "queue", "transformers", "types", "_thread"}
_CLOSED = NOT_FOLLOWED - _OPEN
_ABSENT = object()
_NO_PARAMETER = "which are neither a parameter nor a buffer and may change in place"


def run_part(forward: Callable, module: nn.Module, *inputs: torch.Tensor | None) -> Any:
    """The result of ``forward(module, *inputs)``.

    Raises:
        SideEffectError: If the module, a child, its class or what its functions reach holds something else afterwards,
            if there is too much to compare, if a hook on a gradient may change more, or if the forward reads tensors
            that are neither parameters nor buffers: no call could see that they change. Whatever was changed, but the
            numbers of tensors, is as before.
    """
    held = Reached(forward, module, inputs)
    arrays = [] if held.is_simple else arrays_read(module, forward)
    if arrays:
        raise SideEffectError(f"its forward reads the numbers of its {arrays[0]}, {_NO_PARAMETER}")
    try:
        result = forward(module, *inputs)
    finally:
        changed = held.restore()
    changed += [f"{name} of its result" for name in held.attributes_of_result(result)]
    if changed:
        raise SideEffectError(f"its forward also sets {', '.join(dict.fromkeys(changed))}, which others may read")
    return result


def copies_of_containers(attributes: dict[str, Any]) -> dict[str, Any]:
    """`attributes` with copies of lists, dictionaries and sets, so that a dummy's forward does not change a model's."""
    return {name: value.copy() if type(value) in CONTAINERS else value for name, value in attributes.items()}


# ---------------------------------------------------------------------------------------------------------------------
# What a run can reach
# ---------------------------------------------------------------------------------------------------------------------


class _Held(NamedTuple):
    """Something that may change: what it holds by name or by place, now and before, and how it gets that back."""

    path: str
    named: bool
    read: Callable[[], dict[Any, Any]]
    write: Callable[[dict[Any, Any], list[Any]], None]
    before: dict[Any, Any]


class Reached:
    """All that a run of `forward` on `module` may change, as it is before the run.

    Raises:
        SideEffectError: If these are more than 10,000 objects, or if a function registers hooks, which run later.

    Attributes:
        is_simple: Whether it has found no tensors or arrays but parameters, buffers and inputs, and few objects.
    """

    def __init__(self, forward: Callable, module: nn.Module, inputs: Iterable[Any]) -> None:
        self._seen: set[int] = set()
        self._files: set[tuple[int, int]] = set()
        # These also keep alive what was held, so that nothing new gets the identity of something old.
        self._held: list[_Held] = []
        self._pending: list[tuple[str, Any]] = []
        for value in inputs:
            if isinstance(value, torch.Tensor):
                self._seen.add(id(value))
                self._attributes("its input.", value)
        self._given = {id(each) for each in (*inputs, *module.parameters(), *module.buffers())}
        self.is_simple = True
        for path, part in module.named_modules():
            self._pending.append((path, part))
            for function in (forward, *reads_of(type(part)).functions):
                self._root(function)
        while self._pending:
            self._look(*self._pending.pop())
        self.is_simple = self.is_simple and len(self._seen) < FEW

    def restore(self) -> list[str]:
        """The names of what changed, after it got back what it held before."""
        changed = []
        for path, named, read, write, before in self._held:
            after = read()
            if len(before) == len(after) and all(map(operator.is_, before.values(), after.values())):
                continue
            keys = [key for key in {**before, **after} if not _same(before.get(key, _ABSENT), after.get(key, _ABSENT))]
            if keys:
                write(before, keys)
                changed += [f"{path}{key}" for key in keys] if named else [path]
        return changed

    def attributes_of_result(self, result: Any) -> list[str]:
        """The names of attributes of tensors in `result` that the run has made."""
        values = result if isinstance(result, (tuple, list)) else (result,)
        made = [each for each in values if isinstance(each, torch.Tensor) and id(each) not in self._seen]
        return [name for each in made for name in each.__dict__]

    def _hold(self, path: str, named: bool, read: Callable, write: Callable) -> dict[Any, Any]:
        before = read()
        self._held.append(_Held(path, named, read, write, before))
        for key, value in before.items():
            if type(value) not in _PLAIN:
                self._pending.append((f"{path}{key}" if named else path, value))
        return before

    def _look(self, path: str, value: Any) -> None:
        """Holds what is in `value` itself; what that holds is looked at later."""
        if type(value) in _PLAIN or id(value) in self._seen:
            return
        self._seen.add(id(value))
        self.is_simple = self.is_simple and (id(value) in self._given or not is_array(value))
        if len(self._seen) > _MOST:
            raise SideEffectError(f"its forward reaches more than {_MOST} objects, too many to see whether it sets one")
        if isinstance(value, types.FunctionType):
            if package_of(value.__globals__.get("__name__")) not in NOT_FOLLOWED:
                self._function(path, value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, torch.Tensor):
            self._hold(path, False, lambda: {0: version_of(value)}, _leave)
            self._attributes(f"{path}.", value)
        elif not isinstance(value, types.ModuleType):
            self._object(path, value)

    def _object(self, path: str, value: Any) -> None:
        if isinstance(value, (*CONTAINERS, tuple, frozenset)):
            self._hold(path, False, functools.partial(_inside, value), functools.partial(_refill, value))
        if isinstance(value, WRAPPERS):
            self._pending += [(path, getattr(value, name, None)) for name in WRAPPED]
        if isinstance(value, types.CellType):
            self._hold(path, False, functools.partial(_of_cell, value), functools.partial(_refill_cell, value))
        elif package_of(type(value).__module__) not in _CLOSED:
            self._attributes(f"{path}.", value)
            if slots := slots_of(type(value)):
                self._hold(
                    f"{path}.",
                    True,
                    lambda: {name: getattr(value, name) for name in slots if hasattr(value, name)},
                    functools.partial(_set_back, value),
                )
            if package_of(type(value).__module__) not in NOT_FOLLOWED:
                self._pending.append((path, type(value)))

    def _attributes(self, path: str, value: Any) -> None:
        """Holds what is in the `__dict__` of an object, if it has one."""
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict:
            self._hold(path, True, attributes.copy, functools.partial(_put_back, attributes))

    def _module(self, path: str, module: nn.Module) -> None:
        prefix, attributes = f"{path}." if path else "", module.__dict__

        def read() -> dict[str, Any]:
            return {name: attributes[name] for name in attributes.keys() - _NOT_OF_PARTS}

        self._hold(prefix, True, read, functools.partial(_put_back, attributes))
        for tensors in (module._parameters, module._buffers):
            self._hold(prefix, True, tensors.copy, functools.partial(_put_back, tensors))
        self._pending += [(prefix + name, child) for name, child in module._modules.items()]
        self._pending.append((path, type(module)))

    def _class(self, kind: type) -> None:
        if package_of(kind.__module__) not in CODE_OF_OTHERS:
            self._hold(
                f"{kind.__name__}.",
                True,
                lambda: {name: value for name, value in vars(kind).items() if not name.startswith("__")},
                functools.partial(_set_back, kind),
            )
            called = [each for each in vars(kind).values() if isinstance(each, types.FunctionType)]
            self._pending += [(kind.__name__, each) for each in (*kind.__bases__, *called)]

    def _names(self, path: str, names: Iterable[str], space: dict[str, Any]) -> dict[str, Any]:
        """Holds what has these `names` in a file."""

        def read() -> dict[str, Any]:
            return {name: space[name] for name in names if name in space}

        return self._hold(path, True, read, functools.partial(_put_back, space))

    def _root(self, function: Any) -> None:
        """Looks at a function of a model, and at what it wraps, wherever they come from."""
        while isinstance(function, types.FunctionType) and id(function) not in self._seen:
            self._seen.add(id(function))
            if package_of(function.__globals__.get("__name__")) not in FRAMEWORKS:
                self._function(function.__name__, function)
            function = getattr(function, "__wrapped__", None)

    def _function(self, path: str, function: types.FunctionType) -> None:
        names = code_reads(function.__code__)[0]
        if "register_hook" in names:
            raise SideEffectError("its forward hooks a gradient, and what the hook changes would be lost")
        found = self._names("the global ", names, function.__globals__)
        files = [each for each in found.values() if isinstance(each, types.ModuleType)]
        files += [sys.modules[name] for name in names if name in sys.modules]  # imported inside of the function
        while files:
            file = files.pop()
            if (id(file), id(names)) not in self._files and package_of(file.__name__) not in NOT_FOLLOWED:
                self._files.add((id(file), id(names)))
                found = self._names(f"{file.__name__}.", names, vars(file))
                files += [each for each in found.values() if isinstance(each, types.ModuleType)]
        for value in (*(function.__closure__ or ()), function.__defaults__, function.__kwdefaults__):
            self._pending.append((path, value))
        self._attributes(f"{path}.", function)


def _same(one: Any, other: Any) -> bool:
    """Whether nobody can tell them apart; NaN is another number than itself."""
    return one is other or (type(one) is type(other) and type(one) in (bool, int, str) and one == other)


def _native(container: Any) -> Any:
    """The built-in type of a container, whose methods a subclass may override, such as one that makes what is asked."""
    return next(kind for kind in type(container).__mro__ if kind.__module__ in ("builtins", "collections"))


def _inside(container: Any) -> dict[Any, Any]:
    if isinstance(container, dict):
        return dict(_native(container).items(container))
    values = _native(container).__iter__(container)
    if isinstance(container, (set, frozenset)):
        return {id(each): each for each in values}
    return dict(enumerate(values))


def _refill(container: Any, before: dict[Any, Any], _: list[Any]) -> None:
    kind = _native(container)
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in before.items():
            kind.__setitem__(container, key, value)
    elif isinstance(container, set):
        kind.update(container, before.values())
    else:
        kind.extend(container, before.values())


def _put_back(space: dict[str, Any], before: dict[str, Any], names: list[str]) -> None:
    for name in names:
        space.pop(name, None)
        if name in before:
            space[name] = before[name]


def _set_back(owner: Any, before: dict[str, Any], names: list[str]) -> None:
    for name in names:
        if name in before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)


def _of_cell(cell: types.CellType) -> dict[str, Any]:
    try:
        return {"": cell.cell_contents}
    except ValueError:  # an empty cell
        return {}


def _refill_cell(cell: types.CellType, before: dict[str, Any], _: list[Any]) -> None:
    if before:
        cell.cell_contents = before[""]
    else:
        del cell.cell_contents


def _leave(_before: dict[Any, Any], _keys: list[Any]) -> None:
    """The numbers of a tensor, which no one has kept, stay as they are."""
