"""A copy of a user's function together with all it may change, so that calling the copy leaves no trace."""

from __future__ import annotations

import collections
import dis
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy", "transformers"}
"""Their modules, functions and classes keep nothing of a user's."""

_LARGEST = 2**20  # elements of a tensor that is copied
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_MAPPINGS = (dict, collections.Counter, collections.OrderedDict)


class _CannotCopyError(Exception):
    """Something that a function uses is shared with others, or not known."""


def copied_function(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of `function` with its own closure, globals, attributes and defaults; None if it holds other things.

    Numbers, texts, small tensors, containers of those, functions, parts of `torch.nn` and instances of plain classes
    are copied. What other libraries keep, such as a file or a client, is not.
    """
    try:
        return _copied(function, {})  # type: ignore[no-any-return]
    except Exception:  # of the user's own objects, too, such as one that is nested deeply
        return None


def _copied(value: Any, done: dict[int, Any]) -> Any:
    """A copy; what is met twice is copied once."""
    if _keeps_nothing(value):
        return value
    if id(value) in done:
        return done[id(value)]
    kind = type(value)
    if kind is types.FunctionType:
        return _copied_function(value, done)
    if kind is functools.partial:
        keywords = {key: _copied(one, done) for key, one in value.keywords.items()}
        return functools.partial(_copied(value.func, done), *_all(value.args, done), **keywords)
    if kind is types.MethodType:
        return types.MethodType(_copied(value.__func__, done), _copied(value.__self__, done))
    if kind in (torch.Tensor, nn.Parameter) and value.numel() <= _LARGEST and value.is_leaf:
        own = value.detach().clone()
        done[id(value)] = copy = (
            nn.Parameter(own, value.requires_grad) if kind is nn.Parameter else own.requires_grad_(value.requires_grad)
        )
        return copy
    if kind in _CONTAINERS:
        done[id(value)] = copy = kind(_all(value, done))
        return copy
    if kind in _MAPPINGS:
        done[id(value)] = copy = kind()
        copy.update((_copied(key, done), _copied(one, done)) for key, one in value.items())
        return copy
    return _copied_instance(value, done)


def _all(values: Any, done: dict[int, Any]) -> Iterator[Any]:
    return (_copied(one, done) for one in values)


def _keeps_nothing(value: Any) -> bool:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), types.BuiltinFunctionType)):
        return True
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return True
    if not isinstance(value, types.ModuleType | types.FunctionType | type):
        return False
    named = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(named).partition(".")[0] in _LIBRARIES


def _copied_function(function: types.FunctionType, done: dict[int, Any]) -> types.FunctionType:
    namespace = dict(function.__globals__)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    copy = types.FunctionType(function.__code__, namespace, function.__name__, None, cells or None)
    done[id(function)] = copy  # it may name itself
    for name in _names(function.__code__) & namespace.keys():
        namespace[name] = _copied(namespace[name], done)
    for cell, own in zip(cells, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents = _copied(own.cell_contents, done)
        except ValueError:  # an empty one
            continue
    copy.__defaults__ = _copied(function.__defaults__, done)
    copy.__kwdefaults__ = _copied(function.__kwdefaults__, done)
    copy.__dict__.update(_copied(vars(function), done))
    return copy


def _names(code: types.CodeType) -> set[str]:
    """All names that `code`, and the functions inside it, may read as globals."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return {*code.co_names, *(name for each in inner for name in _names(each))}


def _copied_instance(value: Any, done: dict[int, Any]) -> Any:
    """A copy of an object that keeps all it has in its attributes, and whose class keeps nothing."""
    kind = type(value)
    own = [base for base in kind.__mro__ if base is not object]
    if isinstance(value, nn.Module):
        own = [base for base in own if not base.__module__.startswith("torch.nn.")]
        plain = True
    else:
        plain = kind.__reduce_ex__ is object.__reduce_ex__ and not any("__slots__" in vars(base) for base in own)
    if not plain or not hasattr(value, "__dict__") or any(not _is_plain_class(base) for base in own):
        raise _CannotCopyError
    done[id(value)] = copy = object.__new__(kind)
    for key, one in vars(value).items():
        vars(copy)[key] = _copied(one, done)
    return copy


def _is_plain_class(kind: type) -> bool:
    """Whether a class of a user, and what its methods use beside `self`, keep nothing."""
    if isinstance(kind.__dict__.get("__new__"), staticmethod) or type(kind) is not type:
        return False
    for name, each in vars(kind).items():
        each = getattr(each, "__func__", getattr(each, "fget", each))
        if isinstance(each, types.FunctionType):
            if not _method_keeps_nothing(each):
                return False
        elif not name.startswith("__"):  # its own value, which a method may change for all instances
            return False
    return True


def _method_keeps_nothing(method: types.FunctionType) -> bool:
    """Whether a method, which is not copied, and the functions that it calls change nothing but their arguments."""
    checked, waiting = set(), [method]
    while waiting:
        one = waiting.pop()
        if one in checked:
            continue
        checked.add(one)
        used = [one.__globals__[name] for name in _names(one.__code__) & one.__globals__.keys()]
        used += [
            cell.cell_contents
            for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True)
            if name != "__class__"  # of `super()`
        ]
        used += [*(one.__defaults__ or ()), *(one.__kwdefaults__ or {}).values()]
        others = [each for each in used if not _keeps_nothing(each)]
        sets = any(step.opname == "STORE_GLOBAL" for step in dis.get_instructions(one))
        if sets or vars(one) or not all(isinstance(each, types.FunctionType) for each in others):
            return False
        waiting += others
    return True
