"""What the code of a module reads: names of attributes and of globals, and what the objects hold that it uses.

A part of a model computes what was proved as long as what its code reads is as it was; whatever no code reads may
change. Where the module itself is handed on, as to another function, all of its attributes count as read.

[`Inside`] has one rule for each kind of object that a forward uses, to any depth:

- an object of a class of the user, and such a class's own methods: all of its attributes and slots, and what the code
  that is reached reads of its class;
- a function of the user: its code, defaults, closure, attributes and globals;
- a container, and a bound or partial function: all that it holds;
- any other object, such as a config of transformers, and a file: the attributes with names that the code reads.

Files of the standard library, torch and the like hold what their packages put there; of the functions of these, as of
transformers, only the globals of a forward's own file are followed.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.compat.rebound import used_globals


class SideEffectError(Exception):
    """Says what a forward changes besides its result, or why that cannot be seen, as the reason in the report."""


FEW = 1_000
"""So many objects are compared at each call."""
FRAMEWORKS = {
    "torch",
    "numpy",
    "triton",
    "accelerate",
    "deepspeed",
    "peft",
    "bitsandbytes",
    "huggingface_hub",
    "liger_trainer",
}
"""Their functions and objects keep nothing of a forward, and lead to all that a process holds."""
CODE_OF_OTHERS = sys.stdlib_module_names | FRAMEWORKS | {"builtins"}
NOT_FOLLOWED = CODE_OF_OTHERS | {"transformers"}

CONTAINERS = (dict, list, set, collections.deque)
_METHODS = (types.MethodType, types.BuiltinMethodType, property, classmethod, staticmethod)
WRAPPERS = (*_METHODS, functools.partial, functools.cached_property)
WRAPPED = ("__self__", "__func__", "func", "args", "keywords", "fget")
"""The attributes of [`WRAPPERS`] that hold what they call, and with what."""

_BY_NAME = ("getattr", "hasattr", "setattr")


class Reads(NamedTuple):
    """What the forward of a class reads, with the methods that it calls and those that they override."""

    names: frozenset[str]  # the names in the code, of attributes of any object
    strings: frozenset[str]  # the strings in the code that may be names, as in ``getattr(self, name, default)``
    methods: frozenset[str]  # the `names` that the class itself has: methods, properties and constants
    functions: tuple[Any, ...]  # the forward and the methods
    # Forwards and methods of its bases that these may call: the base, the name and the function.
    overridden: tuple[tuple[type, str, Any], ...]
    whole: bool  # whether the code may read attributes by other names


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


def is_array(value: Any) -> bool:
    """Whether `value` is a tensor or an array, whose numbers may change in place."""
    return hasattr(type(value), "__array__") and hasattr(type(value), "__setitem__")


def package_of(name: str | None) -> str:
    """The package of the module with this name."""
    return (name or "").partition(".")[0]


def slots_of(kind: type) -> list[str]:
    """The names of the slots of `kind` and its bases."""
    slots = [vars(each).get("__slots__", ()) for each in kind.__mro__]
    return [name for each in slots for name in ((each,) if isinstance(each, str) else each) if name[:2] != "__"]


# ---------------------------------------------------------------------------------------------------------------------
# What objects hold
# ---------------------------------------------------------------------------------------------------------------------

_ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_PLAIN = (type(None), bool, int, float, str, tuple, *CONTAINERS)
_OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
_MAKING = {"__new__", "__init__", "__post_init__", "__init_subclass__", "__del__"}
_WRAPPED = (*(each for each in WRAPPED if each != "keywords"), "__wrapped__")
_CACHING = type(functools.cache(len))
# A deep copy of a module has these in common with it.
_SHARED = (types.FunctionType, types.ModuleType, type)

Attribute = tuple[Any, str, Any]


class MISSING:
    """The value of an attribute that there is not."""


class Inside:
    """What is found in objects that the code with these `names` reads.

    Attributes:
        attributes: The object, the name of the attribute and the value. The value of ``__dict__`` is a copy.
        containers: The name by which each is read, and itself, and a copy.
        globals: The function that reads each, the name and the value.
        modules: Modules that are in none of `nn.Module`'s dictionaries, without parameters and buffers.
        arrays: The names of tensors and arrays, whose numbers may change in place, and of other modules.
        names: The names that the functions read that were found.

    Args:
        names: Names of attributes.
        shared: Where functions, classes and files are looked at, if elsewhere.
    """

    def __init__(self, names: Iterable[str], shared: Inside | None = None) -> None:
        self._names = frozenset(names)
        self._shared = shared or self
        self._seen: dict[int, Any] = {}  # keeps them alive, so that nothing new gets the identity of something old
        self.attributes: list[Attribute] = []
        self.containers: list[tuple[str, Any, Any]] = []
        self.globals: list[tuple[types.FunctionType, str, Any]] = []
        self.modules: list[nn.Module] = []
        self.arrays: list[str] = []
        self.names: set[str] = set()

    @property
    def is_full(self) -> bool:
        """Whether something may have been left out."""
        return len(self._seen) >= FEW

    def add(self, name: str, value: Any) -> None:
        """Adds what is inside of `value`, which is read by this `name`."""
        if isinstance(value, _ATOMS) or id(value) in self._seen or self.is_full:
            return
        if self._shared is not self and isinstance(value, _SHARED):
            self._shared.add(name, value)
            return
        if isinstance(value, types.FunctionType):
            if _is_users(value):
                self.add_function(value)
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            if any(True for _ in (*value.parameters(), *value.buffers())):
                self.arrays.append(name)
            else:
                self.modules.append(value)
        elif isinstance(value, type):
            if not issubclass(value, nn.Module):
                self._class(value)
        elif is_array(value):
            self.arrays.append(name)
        else:
            self._object(name, value)

    def add_function(self, function: Any) -> None:
        """Adds what `function` and what it wraps read, wherever they come from, and what the functions read it calls.

        Of decorators that are not the user's, these are the functions that they call in their own files.
        """
        function = _function_of(function)
        while isinstance(function, types.FunctionType) and id(function) not in self._seen and not self.is_full:
            self._seen[id(function)] = function
            inner, users = getattr(function, "__wrapped__", None), _is_users(function)
            if users or inner is None:
                self.names.update(*code_reads(function.__code__)[:2])
            if users:
                self.attributes += [(function, name, getattr(function, name)) for name in _OF_FUNCTIONS]
                for value in (function.__defaults__, function.__kwdefaults__):
                    self.add(function.__name__, value)
                self._all_of(function.__name__, function)
                for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                    self._attribute(cell, "cell_contents", name, found_at(cell, "cell_contents"))
            for name, value in used_globals(function).items():
                called = _function_of(value)
                of_file = called is not None and called.__globals__ is function.__globals__
                if not (of_file or users or inner is None):
                    continue
                if not isinstance(value, types.ModuleType):
                    self.globals.append((function, name, value))
                if of_file:
                    self.add_function(called)
                else:
                    self.add(name, value)
            function = inner

    def _object(self, name: str, value: Any) -> None:
        holds = isinstance(value, (*CONTAINERS, tuple, frozenset))
        if holds:
            known = _copied(value)
            if known is not value:
                self.containers.append((name, value, known))
            for each in known.values() if isinstance(known, dict) else known:
                self.add(name, each)
        elif isinstance(value, (*WRAPPERS, _CACHING)):
            keywords = value.keywords.values() if isinstance(value, functools.partial) else ()
            for each in (*(getattr(value, held, None) for held in _WRAPPED), *keywords):
                self.add(name, each)
        if isinstance(value, types.ModuleType):
            self._file(value)
        elif _is_users(type(value)):
            self.attributes.append((value, "__class__", type(value)))
            self._all_of(name, value)
            self.add(name, type(value))
        elif hasattr(value, "__dict__") and not callable(value) and not holds:
            for inner in sorted(self._names):
                found = found_at(value, inner)
                if inner[:2] != "__" and (inner in vars(value) or not callable(found)):
                    self._attribute(value, inner, inner, found)

    def _all_of(self, name: str, value: Any) -> None:
        """Adds all attributes and slots of an object."""
        held = getattr(value, "__dict__", None)
        if type(held) is dict:
            self.attributes.append((value, "__dict__", dict(held)))
            for inner, each in held.items():
                self.add(f"{name}.{inner}", each)
        for inner in slots_of(type(value)):
            self._attribute(value, inner, f"{name}.{inner}", found_at(value, inner))

    def _attribute(self, owner: Any, attribute: str, name: str, value: Any) -> None:
        self.attributes.append((owner, attribute, value))
        self.add(name, value)

    def _class(self, kind: type) -> None:
        for base in filter(_is_users, kind.__mro__):
            for name, value in [*vars(base).items()]:
                operator = name[:2] == "__" and isinstance(value, types.FunctionType) and name not in _MAKING
                if operator or (name[:2] != "__" and name in self._names):
                    self.attributes.append((base, name, found_at(base, name)))
                    self.add(f"{base.__name__}.{name}", value)

    def _file(self, file: types.ModuleType) -> None:
        users = package_of(file.__name__) not in NOT_FOLLOWED
        for name in sorted(self._names & vars(file).keys()):
            value = vars(file)[name]
            if users or isinstance(value, _PLAIN):
                self._attribute(file, name, name, value)


def _copied(value: Any) -> Any:
    """What a container holds, as its built-in type finds it; itself, if that cannot change."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # a subclass may make what it is asked for
    kind = next((each for each in CONTAINERS if isinstance(value, each)), None)
    return value if kind is None else kind(kind.__iter__(value))


def _function_of(value: Any) -> types.FunctionType | None:
    """A function, or the one that the `kernels` library has made a module of, whose forward has it in its closure."""
    if not isinstance(value, nn.Module):
        return value if isinstance(value, types.FunctionType) else None
    held = (found_at(cell, "cell_contents") for cell in getattr(type(value).forward, "__closure__", None) or ())
    return next((each for each in held if isinstance(each, types.FunctionType)), None)


def found_at(owner: Any, name: str) -> Any:
    """The attribute of `owner` with this `name`; `MISSING` if there is none, or if it raises."""
    try:
        return getattr(owner, name)
    except Exception:  # a property may raise anything
        return MISSING


def _is_users(value: Any) -> bool:
    """Whether a function or a class is from no package that is known; a config is as those of its base."""
    if isinstance(value, type):
        packages = {package_of(base.__module__) for base in value.__mro__}
        return package_of(value.__module__) not in NOT_FOLLOWED and "transformers" not in packages
    return package_of(value.__globals__.get("__name__")) not in NOT_FOLLOWED
