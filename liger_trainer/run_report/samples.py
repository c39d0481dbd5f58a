"""The last completions of a policy, with their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from liger_trainer.pages import paragraph, section, table

_ROWS, _CHARACTERS = 8, 2000  # of each cell


def samples(completions: Mapping[str, Any]) -> str:
    """A section with the last completions, or nothing if there are none.

    Args:
        completions: As TRL's trainers keep them: `prompt`, `completion` and `advantages`, each with one value for each
            completion, and `rewards` and `extra`, which hold such columns by their names.
    """
    columns = {
        "prompt": completions.get("prompt", ()),
        "completion": completions.get("completion", ()),
        **completions.get("rewards", {}),
        **completions.get("extra", {}),
        "advantage": completions.get("advantages", ()),
    }
    count = len(columns["prompt"])
    if not count:
        return ""
    columns = {name: list(values)[-_ROWS:] for name, values in columns.items() if len(values) == count}
    rows = [[_shown(value) for value in row] for row in zip(*columns.values(), strict=True)]
    words = f"The last {len(rows)} of the {count} completions that were generated last."
    return section("Samples", paragraph(words), table(list(columns), rows))


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "\n".join(map(_turn, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} … ({len(text):,} characters)"


def _turn(message: Any) -> str:
    """A message of a conversation; its images are named, not shown."""
    if not isinstance(message, Mapping):
        return str(message)
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return f"{message.get('role')}: {content}"
