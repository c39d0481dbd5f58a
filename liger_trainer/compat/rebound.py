"""Copies of functions that call something else by one of the names they use; the function and its module stay."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any


def uses_global(function: types.FunctionType, name: str) -> bool:
    """Whether `function` itself looks `name` up in its module."""
    return name in function.__code__.co_names and name in function.__globals__


def rebound(
    function: types.FunctionType, names: dict[str, Any], closure: tuple[types.CellType, ...] | None = None
) -> types.FunctionType:
    """A copy of `function` that finds these values behind its global `names`, and has `closure` if one is given."""
    namespace = function.__globals__
    if names:
        # Without a module name in its globals, torch.compile looks the names up in these globals, and not in the
        # module of that name, where it would find the originals.
        hidden = () if "__name__" in function.__code__.co_names else ("__name__",)
        namespace = {key: value for key, value in namespace.items() if key not in hidden} | names
    cells = function.__closure__ if closure is None else closure
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    for attribute in ("__module__", "__qualname__", "__doc__", "__annotations__"):
        setattr(copy, attribute, getattr(function, attribute))
    return copy


def called_global(forward: Any, name: str) -> Any:
    """What `forward`, or the function it wraps, finds behind the global `name` that it uses; None if it uses none."""
    while isinstance(forward, types.FunctionType):
        if uses_global(forward, name):
            return forward.__globals__[name]
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
    if uses_global(forward, name):
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


def _holds(cell: types.CellType, function: Any) -> bool:
    try:
        return cell.cell_contents is function
    except ValueError:  # an empty cell
        return False
