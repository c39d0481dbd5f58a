"""Copies of functions that call something else by one of the global names they use; the function itself stays.

A copy shares the globals of its module, so a later change of any other name is seen. Each replaced value gets a name of
its own in the module while the copy lives; all names that were there stay as they are. A later change of the replaced
name in the module does not reach the copy.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

_numbers = itertools.count()


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that `code` and the functions inside of it read as globals."""
    names = [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
    for inner in code.co_consts:
        names += _global_names(inner) if isinstance(inner, types.CodeType) else ()
    return tuple(dict.fromkeys(names))


@functools.cache
def _is_global_alone(code: types.CodeType, name: str) -> bool:
    """Whether `code` itself reads the global `name` and uses the name in no other way, such as for an attribute."""
    named = [each for each in dis.get_instructions(code) if each.opcode in dis.hasname and each.argval == name]
    return bool(named) and all(each.opname == "LOAD_GLOBAL" for each in named)


def _origin(function: types.FunctionType) -> tuple[types.FunctionType, dict[str, Any]]:
    """The function that `function` is a copy of, if it is one, and the values that it finds instead."""
    return getattr(function, "rebound_from", (function, {}))


def used_globals(function: types.FunctionType) -> dict[str, Any]:
    """The globals of its module that `function`, or a function inside of it, reads, and the values it finds now."""
    original, replaced = _origin(function)
    namespace = original.__globals__
    names = (name for name in _global_names(original.__code__) if name in namespace)
    return {name: replaced.get(name, namespace[name]) for name in names}


def rebound(
    function: types.FunctionType, names: dict[str, Any], closure: tuple[types.CellType, ...] | None = None
) -> types.FunctionType:
    """A copy of `function` that finds these values at its global `names`, and has `closure` if one is given."""
    original, earlier = _origin(function)
    names = {**earlier, **names}
    code, namespace = original.__code__, original.__globals__
    aliases = {name: f"_{name}_{next(_numbers)}" for name in names}
    namespace.update({alias: names[name] for name, alias in aliases.items()})
    read = tuple(aliases.get(name, name) for name in code.co_names)
    code = code.replace(co_names=read, co_consts=_with_names(code.co_consts, aliases))
    cells = function.__closure__ if closure is None else closure
    copy = types.FunctionType(code, namespace, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__, rebound_from=(original, names))
    for attribute in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(copy, attribute, getattr(function, attribute))
    for alias in aliases.values():
        weakref.finalize(copy, namespace.pop, alias, None)
    return copy


def _with_names(constants: tuple[Any, ...], names: dict[str, str]) -> tuple[Any, ...]:
    """`constants` of a code object whose inner functions and generators read globals by other names."""
    made: list[Any] = []
    for each in constants:
        if isinstance(each, types.CodeType):
            read = tuple(
                names[name] if name in names and _is_global_alone(each, name) else name for name in each.co_names
            )
            each = each.replace(co_names=read, co_consts=_with_names(each.co_consts, names))
        made.append(each)
    return tuple(made)


def replaced_globals(forward: Any) -> Iterator[tuple[types.FunctionType, str, Any]]:
    """The globals that `forward`, or the function it wraps, finds replaced: whose they are, their names and values.

    The values are those that the module has now.
    """
    while isinstance(forward, types.FunctionType):
        original, replaced = _origin(forward)
        for name in replaced:
            yield original, name, original.__globals__[name]
        forward = getattr(forward, "__wrapped__", None)


def called_global(forward: Any, name: str) -> Any:
    """The value that `forward`, or the function it wraps, finds at the global `name`; None if none of them reads it."""
    while isinstance(forward, types.FunctionType):
        used = used_globals(forward)
        if name in used:
            return used[name]
        forward = getattr(forward, "__wrapped__", None)
    return None


@functools.cache
def forward_calling(forward: Callable, name: str, function: Callable) -> Callable | None:
    """A copy of `forward` whose global `name` is `function`; None if the function that uses the name is out of reach.

    A decorated forward is rebuilt around the copy of what it wraps, which its closure must hold.
    """
    if not isinstance(forward, types.FunctionType):
        return None
    inner = getattr(forward, "__wrapped__", None)
    if name in used_globals(forward) and _is_global_alone(_origin(forward)[0].__code__, name):
        copy = rebound(forward, {name: function})
    else:
        copied = forward_calling(inner, name, function) if inner is not None else None
        cells = forward.__closure__ or ()
        if copied is None or not any(_holds(cell, inner) for cell in cells):
            return None
        copy = rebound(forward, {}, tuple(types.CellType(copied) if _holds(cell, inner) else cell for cell in cells))
        inner = copied
    if inner is not None:
        copy.__wrapped__ = inner  # type: ignore[attr-defined]
    return copy


@functools.cache
def without_packages(forward: Callable) -> Callable | None:
    """A copy of `forward` that calls the torch functions that decorated functions of its module wrap.

    None if one is out of reach.
    """
    copy: Callable | None = forward
    inner = inspect.unwrap(forward)
    for name, value in used_globals(inner).items() if isinstance(inner, types.FunctionType) else ():
        if hasattr(value, "__wrapped__") and copy is not None:
            copy = forward_calling(copy, name, inspect.unwrap(value))
    return copy


def _holds(cell: types.CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # an empty cell
        return False
