"""When a patched module runs its class's own code, to which our forward was proved equal.

A proof holds for the module as it was: its class, its plain attributes, and the children that our forward computes
without calling them, such as an activation. All of these are recorded where a forward is bound, and each call compares
them by identity. Where one of them is another now, the proof says nothing, and the class's own forward runs. So it does
where such a child has a hook, which only a call of the child would run, and inside the transforms of `torch.func`,
which our operators do not support.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from liger_trainer.compat.hooks import is_call_hooked
from liger_trainer.compat.private import require
from liger_trainer.compat.rebound import replaced_globals
from liger_trainer.compat.torch import FUNCTION_TRANSFORMS, MODULE_CONTENTS
from liger_trainer.head.forward import never_a_frame
from liger_trainer.head.step import current_step
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.runtime import triton_drives
from liger_trainer.patching.inside import MISSING, Attribute, Inside, found_at
from liger_trainer.patching.reached import FEW, UnseenError
from liger_trainer.patching.reads import reads_of

require(FUNCTION_TRANSFORMS)
require(MODULE_CONTENTS)


def serves_as_written(x: torch.Tensor) -> bool:
    """Whether the class's own code runs for `x`, because it takes fewer steps.

    That is in a generation on a device without kernels, such as the CPU. The forward of a reference model is not one,
    and has to round as the policy's forward does.
    """
    if torch.is_grad_enabled() or triton_drives(x.device) or torch.compiler.is_compiling():
        return False
    return current_step().generates


# ---------------------------------------------------------------------------------------------------------------------
# Whether a module still is what was proved
# ---------------------------------------------------------------------------------------------------------------------

RECORD = "_liger_trainer_record"
"""The attribute of a module that holds what it was when our forward was bound."""

_ALWAYS_THERE = frozenset(nn.Module().__dict__)
_Pairs = tuple[tuple[str, Any], ...]


class _Part(NamedTuple):
    """The module as it was, or a child that our forward does not call.

    Args:
        owner: The object itself.
        forward: The forward of its class.
        attributes: Names and values in its ``__dict__``.
        absent: Names that it did not have, and that the forward of its class, or ours, asks for.
        contents: As `attributes`, for its children, parameters and buffers, by the name of the dictionary.
        others: Its methods, and what its attributes hold: whose they are, names and values; see [`Inside`].
        containers: Dictionaries, lists and sets that it reads: the name, the container and a copy.
    """

    owner: nn.Module
    forward: Callable
    attributes: _Pairs = ()
    absent: tuple[str, ...] = ()
    contents: tuple[tuple[str, _Pairs], ...] = ()
    others: tuple[Attribute, ...] = ()
    containers: tuple[tuple[str, Any, Any], ...] = ()


class _Record(NamedTuple):
    """The parts, the module first, and the globals that its forward reads: in which function, name, value.

    What is in these globals, in functions and in classes is as in a part. The first parts, `own` of them, belong to
    the module; others are found in globals.
    """

    parts: tuple[_Part, ...]
    own: int
    read: tuple[tuple[types.FunctionType, str, Any], ...]
    others: tuple[Attribute, ...]
    containers: tuple[tuple[str, Any, Any], ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Record:  # a copy reads the same globals
        return self._replace(parts=(*copy.deepcopy(self.parts[: self.own], memo), *self.parts[self.own :]))


def record(module: nn.Module, forward: Callable, live: tuple[str, ...] | None) -> None:
    """Records what `module` is now, for [`is_as_proved`].

    Args:
        module: The module, for which `forward` was proved.
        forward: A function of the module and its inputs.
        live: Names of the attributes and children that `forward` reads at each call; None for all of them, where it
            runs the code of the class.
    """
    module.__dict__[RECORD] = _found(module, [*replaced_globals(forward)] if live is None else [], (), live)[0]


def arrays_read(module: nn.Module, forward: Callable) -> list[str]:
    """The names of the tensors that `forward`, run on `module`, reads which are neither parameters nor buffers.

    Raises:
        UnseenError: If it reads too much.
    """
    insides = _found(module, [], (forward,), ())[1]
    if any(inside.is_full for inside in insides):
        raise UnseenError(f"its forward reads more than {FEW} objects, too many to compare at each call")
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
            found = [(_Part(module, type(module).forward), Inside((), shared))]
        else:
            found = [*_parts(module, live, names, shared)]
        seen = {id(part.owner) for part, _ in found}
        for _, inside in found:  # grows
            for hidden in inside.modules:
                new = [] if id(hidden) in seen else [*_parts_of_called(hidden, names, shared)]
                seen.update(id(part.owner) for part, _ in new)
                found += new
        own = len(found)
        for hidden in shared.modules:  # grows
            found += _parts_of_called(hidden, names, shared, shared)
        if shared.names <= names:
            break
        names |= shared.names  # and again, as they may be names of what was left out
    parts = tuple(
        part._replace(others=(*part.others, *inside.attributes), containers=tuple(inside.containers))
        if inside is not shared
        else part
        for part, inside in found
    )
    globals_read = {(function, name): (function, name, value) for function, name, value in (*read, *shared.globals)}
    held = tuple(shared.attributes), tuple(shared.containers)
    return _Record(parts, own, tuple(globals_read.values()), *held), [shared, *(inside for _, inside in found)]


def is_as_proved(module: nn.Module, tell: bool = True) -> bool:
    """Whether `module` is what it was when it was recorded, so that our forward may run.

    If something has been changed, this is said once. A module may run as it is without a word inside a transform of
    `torch.func`, and where a hook waits for the call of a child that our forward does not call.

    Args:
        module: The module.
        tell: Whether a change is worth a warning.
    """
    known = module.__dict__.get(RECORD)
    if known is None or torch._C._are_functorch_transforms_active():
        return False
    parts, _, read, others_read, containers_read = known
    if parts[0].owner is not module:  # of a shallow copy
        return False
    for owner, forward, attributes, absent, contents, others, containers in parts:
        held = owner.__dict__
        if owner is not module:
            if is_call_hooked(owner):
                return False
        elif type(owner).forward is not forward:
            return _is_changed(module, owner, "forward", tell)
        for name, value in attributes:
            if held.get(name) is not value and _differ(held.get(name), value):
                return _is_changed(module, owner, name, tell)
        for name in absent:
            if name in held or name in held["_parameters"] or name in held["_buffers"]:
                return _is_changed(module, owner, name, tell)
        for dictionary, pairs in contents:
            for name, value in pairs:
                if held[dictionary].get(name) is not value:
                    return _is_changed(module, owner, name, tell)
        changed = _changed_inside(others, containers)
        if changed is not None:
            return _is_changed(module, owner, changed, tell)
    for function, name, value in read:
        if function.__globals__.get(name) is not value:
            return _is_changed(module, module, name, tell)
    changed = _changed_inside(others_read, containers_read)
    return changed is None or _is_changed(module, module, changed, tell)


def _changed_inside(
    others: tuple[tuple[Any, str, Any], ...], containers: tuple[tuple[str, Any, Any], ...]
) -> str | None:
    """The name of the first attribute of other objects, or container, that is another now; None if none is."""
    for owner, name, value in others:
        try:
            found = getattr(owner, name)
        except Exception:  # what is not there, or a property that raises
            found = MISSING
        if found is not value and _differ(found, value):
            return _said(owner, name, found, value)
    for name, container, value in containers:
        if _differ(container, value):
            return name
    return None


def _said(owner: Any, name: str, found: Any, value: Any) -> str:
    """What a message calls an attribute that is another now."""
    if name == "__dict__" and isinstance(found, dict):
        return next((key for key in {**value, **found} if found.get(key, owner) is not value.get(key, owner)), name)
    if isinstance(owner, types.CellType):
        return "nonlocal"
    return owner.__name__ if isinstance(owner, types.FunctionType) else name


never_a_frame(is_as_proved)  # it has no operators
never_a_frame(_changed_inside)


def _differ(one: Any, other: Any) -> bool:
    """Whether two objects are unequal, or cannot be compared, such as tensors."""
    if isinstance(other, functools.partial):
        same = isinstance(one, functools.partial) and one.func is other.func
        return not (same and one.args == other.args and one.keywords == other.keywords)
    if isinstance(other, types.MethodType):
        same = isinstance(one, types.MethodType) and one.__func__ is other.__func__
        return not (same and one.__self__ is other.__self__)
    try:
        return bool(one != other)
    except Exception:
        return True


def _is_changed(module: nn.Module, owner: Any, name: str, tell: bool) -> bool:
    """False, after a warning (where `tell` is set) that says what has been changed."""
    if tell:
        _warn(type(module).__name__, name, "" if owner is module else f" of its {type(owner).__name__}")
    return False


@torch.compiler.assume_constant_result  # a trace runs it
def _warn(kind: str, name: str, of_owner: str) -> None:
    warn_once(
        f"changed {kind} {name}{of_owner}",
        f"`{name}`{of_owner} has been changed since liger_trainer patched this {kind}, so the class's own forward "
        "runs, without our kernel. Call liger_trainer.apply_liger_kernel(model) again after the last change. (Shown "
        "once.)",
    )


def _parts(
    owner: Any, live: tuple[str, ...], names: frozenset[str], shared: Inside, within: Inside | None = None
) -> Iterator[tuple[_Part, Inside]]:
    """`owner`, then its children and theirs, without what is `live` and what its class does not read.

    Args:
        owner: The module.
        live: As in [`record`].
        names: Names that the functions read which its code calls.
        shared: Where what it has in common with its copies is looked at.
        within: Where its attributes are looked at; an own place, if this is None.
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
    whose = {name: kind if _is_property(kind, name) else owner for name in read.methods - {*named}}
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
    yield _Part(owner, kind.forward, tuple(attributes.items()), absent, filled, tuple(others)), inside
    for child in children:
        yield from _parts_of_called(child, names, shared, within)


def _parts_of_called(
    module: nn.Module, names: frozenset[str], shared: Inside, within: Inside | None = None
) -> Iterator[tuple[_Part, Inside]]:
    """As `_parts`, of a module whose forward may be one of its own."""
    (part, inside), *inner = _parts(module, (), names, shared, within)
    yield part._replace(others=((module, "forward", module.forward), *part.others)), inside
    yield from inner


def _is_property(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), (property, functools.cached_property))
