"""Checks that the private names a feature relies on are present and look as expected."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import logging
import types
from collections.abc import Iterator
from typing import Any

logger = logging.getLogger("liger_trainer")

TESTED = {
    "accelerate": "1.15.0",
    "bitsandbytes": "0.50.2",
    "datasets": "5.2.0",
    "deepspeed": "0.19.8",
    "peft": "0.21.2",
    "tokenizers": "0.23.3",
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "triton": "3.9.0",
    "trl": "1.16.0",
}
"""The versions that the tests run with, the newest where they are several; the same as in constraints.txt."""


@dataclasses.dataclass(frozen=True)
class Private:
    """A private name of another library, and what we expect of it."""

    path: str  # ``"module:function"``, ``"module:Class"`` or ``"module:Class.method"``
    # All parameters, in order, such as ``"self, x"``; after ``"..."`` others may follow. None for any.
    parameters: str | None = None
    # Attributes, globals or strings that the body of the function must use, such as ``"weight, bias"``: how an
    # attribute that only instances have, or a global that we replace, is checked.
    uses: str = ""
    # Local variables that the body must assign one after the other: the order of a tuple that we build.
    unpacks: str = ""

    @property
    def library(self) -> str:
        """The name of the distribution."""
        return self.path.partition(":")[0].partition(".")[0]

    @property
    def name(self) -> str:
        """The path as a reader would write it."""
        return self.path.replace(":", ".")

    def find(self) -> Any:
        """The object itself."""
        module, _, qualified_name = self.path.partition(":")
        return functools.reduce(getattr, qualified_name.split("."), importlib.import_module(module))

    def problem(self) -> str | None:
        """What is missing or different in the installed version; None if nothing is."""
        try:
            found = self.find()
        except (ImportError, AttributeError):
            return "is missing"
        if self.parameters is not None:
            given = list(inspect.signature(found).parameters)
            if not _matches(given, _split(self.parameters)):
                return f"takes ({', '.join(given)}), not ({self.parameters})"
        codes = list(_codes(found)) if self.uses or self.unpacks else []
        mentioned = {name for code in codes for name in _names(code)}
        unused = [name for name in _split(self.uses) if name not in mentioned]
        if unused:
            return f"no longer uses {', '.join(f'`{name}`' for name in unused)}"
        if self.unpacks and not any(f", {self.unpacks}, " in f", {', '.join(code.co_varnames)}, " for code in codes):
            return f"no longer unpacks ({self.unpacks})"
        return None


class Feature:
    """A feature of ours, and the private names of one library without which it does not work.

    Args:
        text: The feature, in words, for messages.
        *names: All from one library.
        needed: Whether training could go wrong without it. If not, it is switched off where a name has changed.
        since: The first version of the library that has the names, and needs the feature; None for all that we allow.
        canary: For a feature that recognises something by its shape, so that no name shows a change: our
            function, as ``"module:function"``, which builds the thing with the installed library, tries to recognise
            it, and returns what has changed, or None. It runs once, when the feature is first used.
    """

    def __init__(
        self, text: str, *names: Private, needed: bool = True, since: str | None = None, canary: str | None = None
    ) -> None:
        self.text, self.names, self.needed, self.since, self.canary = text, names, needed, since, canary

    @property
    def library(self) -> str:
        """The name of the distribution that the names come from."""
        return self.names[0].library

    @property
    def applies(self) -> bool:
        """Whether there is something to check: not where an older version is installed."""
        installed = installed_version(self.library)
        return self.since is None or installed is None or is_at_least(self.library, self.since)


_in_trial: set[Feature] = set()


def tried(feature: Feature) -> str | None:
    """What the canary of `feature` says has changed; None if nothing has, or if there is no canary."""
    if feature.canary is None or feature in _in_trial:  # which runs the very code that asks
        return None
    return _tried(feature)


@functools.cache
def _tried(feature: Feature) -> str | None:
    module, _, name = str(feature.canary).partition(":")
    _in_trial.add(feature)
    try:
        # Without what the caller has set: a canary may run in the middle of a forward.
        return contextvars.Context().run(getattr(importlib.import_module(module), name))
    except Exception as error:  # whatever another version of the library may raise
        return f"trying it raises {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    finally:
        _in_trial.discard(feature)


def require(feature: Feature) -> list[Any]:
    """Checks a feature that must work.

    Returns:
        The objects that the names stand for, in order.
    """
    message = _message(feature)
    if message is not None:
        raise ImportError(message)
    return [name.find() for name in feature.names]


@functools.cache
def available(feature: Feature) -> bool:
    """Checks a feature without which training is still right; warns, once, if a name is missing or has changed.

    It does not if the library is not installed.
    """
    message = _message(feature)
    if message is not None and installed_version(feature.library) is not None:
        logger.warning("%s Until then this is off; training is right without it.", message)
    return message is None


def installed_version(library: str) -> str | None:
    """The installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_at_least(library: str, version: str) -> bool:
    """Whether an installed distribution is of this version or newer."""
    from packaging.version import Version

    return Version(importlib.metadata.version(library)) >= Version(version)


def is_newer_than_tested(library: str) -> bool:
    """Whether the installed version of a library is newer than the one that the tests run with."""
    from packaging.version import Version

    found = installed_version(library)
    if found is None or library not in TESTED:
        return False
    return Version(Version(found).public) > Version(TESTED[library])


def mentions(function: Any, name: str) -> bool:
    """Whether the code of a function uses `name`: an attribute, a global, a variable or a string."""
    return any(name == used for code in _codes(function) for used in _names(code))


def _message(feature: Feature) -> str | None:
    problems = ((name, name.problem()) for name in feature.names)
    problem = next((f"`{name.name}` {problem}" for name, problem in problems if problem), None) or tried(feature)
    if problem is None:
        return None
    library = feature.library
    return (
        f"{library} {installed_version(library) or '(not installed)'}: {problem}, which liger_trainer "
        f"needs for {feature.text}. Install the version it is tested with: `pip install {library}=={TESTED[library]}`."
    )


def _split(names: str) -> list[str]:
    return names.split(", ") if names else []


def _matches(given: list[str], expected: list[str]) -> bool:
    if {"args", "kwargs"} <= set(given) <= {"self", "args", "kwargs"}:  # a wrapper that passes on what it is given
        return True
    if expected[-1:] == ["..."]:
        return given[: len(expected) - 1] == expected[:-1]
    return given == expected


def _codes(function: Any) -> Iterator[types.CodeType]:
    """The code of a function or a method, of the functions in it, and of those that a decorator has wrapped."""
    pending, seen = [getattr(function, "__func__", function)], set()
    while pending:
        current = pending.pop()
        if isinstance(current, types.FunctionType) and id(current) not in seen:
            seen.add(id(current))
            pending.append(current.__code__)
            for cell in current.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    pending.append(cell.cell_contents)
        elif isinstance(current, types.CodeType):
            yield current
            pending += current.co_consts


def _names(code: types.CodeType) -> Iterator[str]:
    """The names and strings that `code` uses, those in constant tuples included."""
    pending: list[tuple[Any, ...]] = [code.co_names, code.co_varnames, code.co_freevars, code.co_consts]
    while pending:
        for item in pending.pop():
            if isinstance(item, str):
                yield item
            elif isinstance(item, tuple):
                pending.append(item)
