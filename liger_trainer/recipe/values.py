"""Checks every key and value of a recipe, from the file and the command line, against the fields they stand for."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from liger_trainer.recipe.checks import check_agreement, check_ranges
from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.trainers import TRAINERS, argument_classes

if TYPE_CHECKING:
    from argparse import Action, ArgumentParser


def _parser(classes: Sequence[Any]) -> ArgumentParser:
    from trl import TrlParser

    class Parser(TrlParser):
        def error(self, message: str) -> typing.NoReturn:
            raise RecipeError(f"On the command line: {message}.")

    parser = Parser(tuple(classes), allow_abbrev=False, add_help=False)
    for action in parser._actions:
        if action.nargs == "?" and action.const is True and action.type is str:
            action.type = _switch
    return parser


def _switch(text: str) -> bool | str:
    """The value of an option that is true where none follows it, though its type says text: transformers' `fsdp`."""
    return {"true": True, "false": False}.get(text.lower(), text)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value already has the type a field asks for."""
    for option in _alternatives(hint):
        origin = typing.get_origin(option) or option
        if option is Any or (option is type(None) and value is None):
            return True
        if origin is Literal and value in typing.get_args(option):
            return True
        if not isinstance(origin, type):
            continue
        if dataclasses.is_dataclass(origin) and isinstance(value, dict):
            return True
        if origin is float and isinstance(value, int) and not isinstance(value, bool):
            return True
        if isinstance(value, bool) and origin is not bool:
            continue
        if isinstance(value, origin):
            inner = typing.get_args(option)
            return not (isinstance(value, list) and inner) or all(_fits(item, inner[0]) for item in value)
    return False


def _name(hint: Any) -> str:
    names = []
    for option in _alternatives(hint):
        if typing.get_origin(option) is Literal:
            names.append("one of " + ", ".join(repr(choice) for choice in typing.get_args(option)))
        elif isinstance(option, type) and issubclass(option, Enum):
            names.append("one of " + ", ".join(repr(choice.value) for choice in option))
        elif option is not type(None):
            names.append(option.__name__ if isinstance(option, type) else str(option).replace("typing.", ""))
    return " or ".join(names)


def _convert(value: Any, hint: Any, action: Action) -> Any:
    """`value` as the field wants it, text read as the command line reads it; ValueError where it does not fit."""
    if action.nargs == "+" and value is not None and not isinstance(value, (list, dict)):
        value = [value]
    if action.choices is not None and value is not None and value not in action.choices:
        raise ValueError("one of " + ", ".join(repr(choice) for choice in action.choices))
    if _fits(value, hint) or (action.type is _switch and isinstance(value, (bool, list))):
        return value
    if str in _alternatives(hint) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and callable(action.type):
        with contextlib.suppress(Exception):
            return action.type(value)
    raise ValueError(_name(hint))


def _unknown(key: str, valid: Sequence[str], where: str, trainer: str) -> RecipeError:
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    hint = f"; did you mean `{near[0]}`?" if near else "."
    return RecipeError(f"{where}: unknown key `{key}` for `trainer: {trainer}`{hint}")


def check_values(values: Mapping[str, Any], overrides: Sequence[str], source: Path) -> tuple[dict[str, Any], set[str]]:
    """Checks every key and value of a recipe against its fields.

    Args:
        values: The file's keys and values.
        overrides: Command-line options, such as ``["--max_steps", "10"]``; they win.
        source: The file, for the messages.

    Returns:
        All fields with their values, and the names that `overrides` set.

    Raises:
        RecipeError: for an unknown key, a value of the wrong type or out of its range, and keys that contradict.
    """
    trainer = values.get("trainer", "sft")
    for position, option in enumerate(overrides):
        if option == "--trainer" and position + 1 < len(overrides):
            trainer = overrides[position + 1]
        elif option.startswith("--trainer="):
            trainer = option.split("=", 1)[1]
    if trainer not in tuple(TRAINERS):  # a list, say, cannot be looked up in a dict
        raise RecipeError(f"{source}: `trainer` is {trainer!r}; it must be one of {', '.join(map(repr, TRAINERS))}.")

    classes = argument_classes(trainer)
    parser = _parser(classes)
    hints = {name: hint for cls in classes for name, hint in typing.get_type_hints(cls).items()}
    actions: dict[str, list[Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    for key, value in values.items():
        if key not in actions:
            raise _unknown(key, list(actions), str(source), trainer)
        try:
            value = _convert(value, hints[key], actions[key][0])
        except ValueError as error:
            raise RecipeError(f"{source}: `{key}` is {value!r}; it must be {error}.") from error
        for action in actions[key]:
            action.default, action.required = value, False

    # argparse prints usage on stderr before error(); the message alone says enough.
    with contextlib.redirect_stderr(io.StringIO()):
        namespace, rest = parser.parse_known_args(list(overrides))
    if rest:
        valid = list(actions)
        if rest[0].startswith("-"):
            raise _unknown(rest[0].lstrip("-").split("=")[0].replace("-", "_"), valid, "On the command line", trainer)
        raise RecipeError(f"On the command line: {rest[0]!r} follows no option; options are `--key value`.")
    written = {option.split("=")[0].lstrip("-").replace("-", "_") for option in overrides if option.startswith("--")}
    given = {name for name in actions if name in written or f"no_{name}" in written}
    checked = vars(namespace)
    check_ranges(checked, source)
    check_agreement(checked, source)
    return checked, given
