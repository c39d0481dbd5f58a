"""What a module is when our forward is bound, for [`is_as_proved`], which compares it at each call.

A proof holds for the module as it was: its class, its plain attributes, and the children that our forward computes
without calling them, such as an activation, with all that they use (`reads.py`).
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.rebound import replaced_globals
from liger_trainer.compat.torch import MODULE_CONTENTS
from liger_trainer.patching.reads import FEW, Attribute, Inside, SideEffectError, found_at, reads_of

require(MODULE_CONTENTS)

RECORD = "_liger_trainer_record"
"""The attribute of a module that holds what it was when our forward was bound."""

_ALWAYS_THERE = frozenset(nn.Module().__dict__)
_PROPERTIES = (property, functools.cached_property)
_Pairs = tuple[tuple[str, Any], ...]


class _Part(NamedTuple):
    """The module as it was, or a child that our forward does not call."""

    owner: nn.Module  # the object itself
    forward: Callable  # the forward of its class
    attributes: _Pairs = ()  # names and values in its ``__dict__``
    absent: tuple[str, ...] = ()  # names that it did not have, and that the forward of its class, or ours, asks for
    # Names and values of its children, parameters and buffers, by the name of the dictionary.
    contents: tuple[tuple[str, _Pairs], ...] = ()


class _Used(NamedTuple):
    """Other objects that a part uses, or a global (then `owner` is None)."""

    owner: nn.Module | None  # the part
    # Its methods, and what its attributes hold: whose they are, names and values; see [`Inside`].
    attributes: tuple[Attribute, ...]
    # Dictionaries, lists and sets that it reads: the name, the container and a copy.
    containers: tuple[tuple[str, Any, Any], ...]


class _Known(NamedTuple):
    """Parts, and what they use."""

    parts: tuple[_Part, ...]
    used: tuple[_Used, ...]


class _Record(NamedTuple):
    """What a module was when our forward was bound."""

    own: _Known  # the module, which is the first part, and what belongs to it
    shared: _Known  # modules and objects that were found in globals, in functions and in classes
    # The globals that its forward reads: in which function, name, value.
    read: tuple[tuple[types.FunctionType, str, Any], ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:  # a copy reads the same globals
        return self._replace(own=copy.deepcopy(self.own, memo))


def record(module: nn.Module, forward: Callable, live: tuple[str, ...] | None) -> None:
    """Records what `module` is now, for [`is_as_proved`]; [`bind_forward`] says what is `live`."""
    module.__dict__[RECORD] = _found(module, [*replaced_globals(forward)] if live is None else [], (), live)[0]


_Found = tuple[_Part, list[Attribute], Inside]


def arrays_read(module: nn.Module, forward: Callable) -> list[str]:
    """The names of the tensors that `forward`, run on `module`, reads which are neither parameters nor buffers."""
    insides = _found(module, [], (forward,), ())[1]
    if any(inside.is_full for inside in insides):
        raise SideEffectError(f"its forward reads more than {FEW} objects, too many to compare at each call")
    return [name for inside in insides for name in inside.arrays]


def _found(
    module: nn.Module,
    read: list[tuple[types.FunctionType, str, Any]],
    functions: tuple[Any, ...],
    live: tuple[str, ...] | None,
) -> tuple[_Record, list[Inside]]:
    """What `module`, these `functions` and globals hold, and where it was found."""
    names: frozenset[str] = frozenset()
    while True:
        shared = Inside(reads_of(type(module)).names | names)
        for function in (*functions, *(value for *_, value in read)):
            shared.add_function(function)
        if live is None:
            found: list[_Found] = [(_Part(module, type(module).forward), [], Inside((), shared))]
        else:
            found = [*_parts(module, live, names, shared)]
        seen = {id(part.owner) for part, *_ in found}
        for *_, inside in found:  # grows
            for hidden in inside.modules:
                new = [] if id(hidden) in seen else [*_parts_of_called(hidden, names, shared)]
                seen.update(id(part.owner) for part, *_ in new)
                found += new
        in_globals: list[_Found] = []
        for hidden in shared.modules:  # grows
            in_globals += _parts_of_called(hidden, names, shared, shared)
        if shared.names <= names:
            break
        names |= shared.names  # and again, as they may be names of what was left out
    globals_read = {(function, name): (function, name, value) for function, name, value in (*read, *shared.globals)}
    own = [_Used(part.owner, (*others, *inside.attributes), tuple(inside.containers)) for part, others, inside in found]
    others_used = [_Used(part.owner, tuple(others), ()) for part, others, _ in in_globals]
    others_used.append(_Used(None, tuple(shared.attributes), tuple(shared.containers)))
    insides = [shared, *(inside for *_, inside in (*found, *in_globals))]
    record = _Record(_known(found, own), _known(in_globals, others_used), tuple(globals_read.values()))
    return record, insides


def _known(found: list[_Found], used: list[_Used]) -> _Known:
    parts = tuple(part for part, *_ in found)
    return _Known(parts, tuple(each for each in used if each.attributes or each.containers))


def _parts(
    owner: Any, live: tuple[str, ...], names: frozenset[str], shared: Inside, within: Inside | None = None
) -> Iterator[_Found]:
    """`owner`, then its children and theirs, without what is `live` and what its class does not read.

    The code that it calls reads `names`. What it has in common with its copies is looked at in `shared`, and its
    attributes in `within`, or in a place of their own.
    """
    kind, held = type(owner), owner.__dict__
    read = reads_of(kind)
    known = read.names | read.strings
    named = {*held, *held["_modules"], *held["_parameters"], *held["_buffers"]}
    # What the class never reads must not change what ours reads.
    alone = {name for name in live if name not in known and name not in held["_modules"]}
    free = {*live} - alone
    attributes = {
        name: value
        for name, value in held.items()
        if name not in _ALWAYS_THERE
        and name not in (RECORD, *free)
        and (name in known or name in alone or (read.whole and (name[0] != "_" or name in names)))
    }
    # Strings: of `getattr(self, name, default)`.
    absent = tuple(sorted(name for name in {*read.strings, *alone} - {*named, *free} if not hasattr(kind, name)))
    contents = {
        "_modules": [(name, child) for name, child in held["_modules"].items() if name not in free],
        "_parameters": [
            (name, None) for name, each in held["_parameters"].items() if each is None and name not in free
        ],
        "_buffers": [(name, None) for name, each in held["_buffers"].items() if each is None and name not in free],
    }
    children = [child for _, child in contents["_modules"] if child is not None]
    # A property is compared as it is in the class, without its value.
    properties = {name for name in read.methods if isinstance(getattr(kind, name, None), _PROPERTIES)}
    whose = {name: kind if name in properties else owner for name in read.methods - {*named}}
    others = [(each, name, found_at(each, name)) for name, each in sorted(whose.items(), key=str)]
    others += [(base, name, getattr(base, name)) for base, name, _ in read.overridden]
    inside = within or Inside(known | names, shared)
    for function in read.functions:
        shared.add_function(function)
    for name in read.methods:
        shared.add(name, getattr(kind, name))
    for name, value in attributes.items():
        if name in known or name in names:
            inside.add(name, value)
    filled = tuple((name, tuple(pairs)) for name, pairs in contents.items() if pairs)
    yield _Part(owner, kind.forward, tuple(attributes.items()), absent, filled), others, inside
    for child in children:
        yield from _parts_of_called(child, names, shared, within)


def _parts_of_called(
    module: nn.Module, names: frozenset[str], shared: Inside, within: Inside | None = None
) -> Iterator[_Found]:
    """As `_parts`, of a module whose forward may be one of its own."""
    (part, others, inside), *inner = _parts(module, (), names, shared, within)
    if "forward" in module.__dict__:
        others = [(module, "forward", module.forward), *others]
    else:
        part = part._replace(absent=(*part.absent, "forward"))
    yield part, others, inside
    yield from inner
