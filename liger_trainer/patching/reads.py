"""What the code of a class reads: names of attributes and of globals (what these hold is found by `inside.py`).

A part of a model computes what was proved as long as what its code reads is as it was; whatever no code reads may
change. Where the module itself is handed on, as to another function, all of its attributes count as read.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import types
from typing import Any, NamedTuple

from torch import nn

CONTAINERS = (dict, list, set, collections.deque)
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
    methods = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)
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
    pending = ["forward", "__getattr__"]
    while pending:
        defined = pending.pop()
        found = [(base, vars(base)[defined]) for base in bases if defined in vars(base)]
        overridden += [(base, defined, value) for base, value in found[1:] if callable(value)]
        for _, value in found:
            function = getattr(value, "func", None) if isinstance(value, functools.cached_property) else value
            function = getattr(function, "fget", function)
            function = getattr(function, "__func__", function)
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
        new = {
            name for name in names - methods - {"forward", "__getattr__"} if any(name in vars(base) for base in bases)
        }
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
