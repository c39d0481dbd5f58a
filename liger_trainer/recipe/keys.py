"""The keys of a trainer's recipes, as a person reads them: name, type, default and one sentence each."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from typing import Any, Literal

from liger_trainer.recipe.schema import argument_classes

OUTPUT_DIR = "outputs/{}"
"""The default of ``output_dir``, for the name of a recipe's file."""

_MOST_CHOICES = 10


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a recipe."""

    name: str
    type: str  # such as ``int``, or the values that it may have
    default: str  # as a recipe would write it
    meaning: str  # one sentence


def keys_of(trainer: str) -> dict[str, list[Key]]:
    """The keys of recipes with this ``trainer``, ours first, by the name of the class that declares them."""
    groups: dict[str, list[Key]] = {}
    for cls in sorted(argument_classes(trainer), key=lambda cls: not cls.__module__.startswith("liger_trainer.recipe")):
        hints, written = typing.get_type_hints(cls), _arguments(cls.__doc__ or "")
        fields = (field for field in dataclasses.fields(cls) if field.init)
        groups[cls.__name__] = [
            Key(
                field.name,
                "|".join(_choices(hints[field.name])) or type_name(hints[field.name]),
                _default(field),
                _first_sentence(field.metadata.get("help") or written.get(field.name, "")),
            )
            for field in fields
        ]
    return groups


def alternatives(hint: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type that it is."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def spelling(choice: Any) -> Any:
    """A value that a field may have, as text if it is true or false: a command line gives text, and YAML these."""
    return str(choice).lower() if isinstance(choice, bool) else choice


def type_name(hint: Any) -> str:
    """A type as a person reads it, without None."""
    options = [option for option in alternatives(hint) if option is not type(None)]
    return " or ".join(one.__name__ if isinstance(one, type) else str(one).replace("typing.", "") for one in options)


def _choices(hint: Any) -> list[str]:
    """The values that a field may have; of very many, the first ones; none if it may have any of its type."""
    found: list[str] = []
    for option in alternatives(hint):
        if typing.get_origin(option) is Literal and str not in alternatives(hint):
            found += dict.fromkeys(str(spelling(choice)) for choice in typing.get_args(option))
        elif isinstance(option, type) and issubclass(option, enum.Enum):
            found += [str(one.value) for one in option]
    return found if len(found) <= _MOST_CHOICES else [*found[:_MOST_CHOICES], "…"]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.name == "output_dir":
        return OUTPUT_DIR.format("RECIPE")
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    value = value.value if isinstance(value, enum.Enum) else value
    return value if isinstance(value, str) and value else json.dumps(value, default=str)


def _arguments(doc: str) -> dict[str, str]:
    """The texts of ``Args:`` in a docstring."""
    texts = inspect.cleandoc(doc).partition("\nArgs:\n")[2]
    return {name: " ".join(text.split()) for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", texts, re.M)}


def _first_sentence(text: str) -> str:
    text = " ".join(text.split())
    first = re.split(r"(?<=\.)(?<!e\.g\.)(?<!i\.e\.)\s+", text, maxsplit=1)[0]
    return first.replace("``", "`").replace("%%", "%")
