"""Copies of functions that call something else by one of the names they use; the function and its module stay."""

from __future__ import annotations

import types
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
