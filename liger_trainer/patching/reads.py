"""What the code of a class reads: names of attributes, and what its globals, containers and configs hold.

A part of a model computes what was proved as long as what its code reads is as it was; whatever no code reads may
change. Where the module itself is handed on, as to another function, all of its attributes count as read.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.compat.rebound import used_globals

CONTAINERS = (dict, list, set, collections.deque)
_PLAIN = (type(None), bool, int, float, str, tuple, *CONTAINERS)
_BY_NAME = ("getattr", "hasattr", "setattr")


class Reads(NamedTuple):
    """What the forward of a class reads, with the methods that it calls and those that they override.

    Args:
        names: The names in the code, of attributes of any object.
        strings: The strings in the code that may be names, as in ``getattr(self, name, default)``.
        methods: The `names` that the class itself has: methods, properties and constants.
        functions: The forward and the methods.
        overridden: Forwards and methods of its bases that these may call: the base, the name and the function.
        whole: Whether the code may read attributes by other names.
    """

    names: frozenset[str]
    strings: frozenset[str]
    methods: frozenset[str]
    functions: tuple[Any, ...]
    overridden: tuple[tuple[type, str, Any], ...]
    whole: bool


def reads_of(kind: type[nn.Module]) -> Reads:
    """What the forward of `kind` reads."""
    bases = tuple(base for base in kind.__mro__ if base not in nn.Module.__mro__)
    methods = (types.FunctionType, property, classmethod, staticmethod)
    # A class may get other methods before it is patched again.
    return _reads(bases, tuple(each for base in bases for each in vars(base).values() if isinstance(each, methods)))


@functools.cache
def _reads(bases: tuple[type, ...], _methods: tuple[Any, ...]) -> Reads:
    names: set[str] = set()
    strings: set[str] = set()
    methods: set[str] = set()
    functions: list[Any] = []
    overridden: list[tuple[type, str, Any]] = []
    whole = not any("forward" in vars(base) for base in bases)
    pending = ["forward"]
    while pending:
        defined = pending.pop()
        found = [(base, vars(base)[defined]) for base in bases if defined in vars(base)]
        overridden += [(base, defined, value) for base, value in found[1:] if callable(value)]
        for _, value in found:
            function = getattr(getattr(value, "fget", value), "__func__", getattr(value, "fget", value))
            inner = inspect.unwrap(function) if callable(function) else None
            code = getattr(inner, "__code__", None)
            if isinstance(code, types.CodeType):
                functions.append(function)
                read = code_reads(code)
                names |= read[0]
                strings |= read[1]
                whole = whole or read[2] or inner is not function  # a decorator hands the module on
            elif callable(function):
                whole = True
        new = {name for name in names - methods - {"forward"} if any(name in vars(base) for base in bases)}
        methods |= new
        pending += new
    return Reads(frozenset(names), frozenset(strings), frozenset(methods), tuple(functions), tuple(overridden), whole)


@functools.cache
def code_reads(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], bool]:
    """The names and strings in `code`, and whether it uses its first argument but to read attributes of it."""
    names: set[str] = set()
    strings: set[str] = set()
    owner = code.co_varnames[0] if code.co_argcount else ""
    escapes, pending = False, [code]
    while pending:
        current = pending.pop()
        names.update(current.co_names)
        strings.update(each for each in current.co_consts if isinstance(each, str) and each.isidentifier())
        pending += [each for each in current.co_consts if isinstance(each, types.CodeType)]
        steps = [each for each in dis.get_instructions(current) if each.opname not in ("CACHE", "EXTENDED_ARG")]
        for before, step, after in zip([None, *steps], steps, [*steps[1:], steps[-1]]):
            if not step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
                continue
            loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
            of_attribute = "ATTR" in after.opname or after.opname == "LOAD_METHOD"
            by_name = before is not None and before.argval in _BY_NAME and isinstance(after.argval, str)
            escapes = escapes or owner in loaded[:-1] or (loaded[-1] == owner and not (of_attribute or by_name))
    return frozenset(names), frozenset(strings), escapes or bool({"__dict__", "vars"} & names)


def globals_of(function: Any) -> Iterator[tuple[types.FunctionType, str, Any]]:
    """What `function` reads of its file, and what the functions read that it calls there: whose, name and value.

    Of decorators, which come from other files, these are the functions that they call there.
    """
    seen: set[Any] = set()
    pending = [function]
    while pending:
        current = pending.pop()
        while isinstance(current, types.FunctionType):
            inner = getattr(current, "__wrapped__", None)
            for name, value in used_globals(current).items():
                of_file = getattr(value, "__globals__", None) is current.__globals__
                if of_file and value not in seen:
                    seen.add(value)
                    pending.append(value)
                    yield current, name, value
                elif not of_file and inner is None:
                    yield current, name, value
            current = inner


def has_attributes(value: Any) -> bool:
    """Whether `value` is an object such as a config; functions and tensors are compared as they are."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, torch.Tensor)


def holds_arrays(value: Any) -> bool:
    """Whether `value` is a tensor or an array, whose numbers may change in place, or a container of some."""
    if isinstance(value, (*CONTAINERS, tuple)):
        return any(map(holds_arrays, value.values() if isinstance(value, dict) else value))
    return hasattr(value, "__array__") and hasattr(value, "__setitem__")


def copied(value: Any) -> Any:
    """`value`, or a copy of a container and of those in it, which is equal as long as they hold what they hold."""
    kind = type(value)
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    if kind in CONTAINERS or kind is tuple:
        return kind(map(copied, value))
    return value


class Inside:
    """What the code with these `names` reads of objects that it reads.

    Attributes:
        attributes: Attributes of configs and other objects: the object, the name and the value.
        containers: The name by which each is read, and itself, and a copy.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = sorted(names)
        self._seen: set[int] = set()
        self.attributes: list[tuple[Any, str, Any]] = []
        self.containers: list[tuple[str, Any, Any]] = []

    def add(self, name: str, value: Any) -> None:
        """Adds what is read of `value`, which is read by this `name`."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (*CONTAINERS, tuple)):
            known = copied(value)
            if not (isinstance(value, tuple) and all(map(_is_one, known, value))):
                self.containers.append((name, value, known))
            for each in value.values() if isinstance(value, dict) else value:
                self.add(name, each)
        elif has_attributes(value) and not isinstance(value, nn.Module):
            of_file = isinstance(value, types.ModuleType)
            for inner in self._names:
                found = getattr(value, inner, None)
                if hasattr(value, inner) and not callable(found) and (isinstance(found, _PLAIN) or not of_file):
                    self.attributes.append((value, inner, found))
                    self.add(inner, found)


def _is_one(one: Any, other: Any) -> bool:
    return one is other
