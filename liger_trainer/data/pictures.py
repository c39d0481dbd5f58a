"""Pictures beside a conversation, put where its text marks their places.

TRL takes a list of pictures in `images`. It puts them before the first turn of the user, unless the contents of turns
are lists of parts that say where each is. Data of LLaVA and LLaMA-Factory says so by `<image>` in the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from liger_trainer.data.shapes import PICTURES, ShapeError
from liger_trainer.data.turns import Turn, without_none

_MARK = "<image>"
_TALKS = ("messages", "prompt", "completion", "chosen", "rejected")


def have_marks(rows: Any, names: Sequence[str]) -> bool:
    """Whether the text of any row marks the place of a picture; streamed rows, which are not read twice, may.

    Args:
        rows: A dataset, streamed or not, or a list of rows.
        names: Their columns; without one of pictures, nothing is a mark.
    """
    spoken = [name for name in names if name not in PICTURES]
    if len(spoken) == len(names):
        return False
    if not isinstance(rows, Dataset | list):
        return True
    rows = rows.select_columns(spoken) if isinstance(rows, Dataset) else rows
    return any(_MARK in str(row[name]) for row in rows for name in spoken)


def at_marks(row: Mapping[str, Any]) -> dict[str, Any]:
    """The conversations of a row, as a trainer takes it, with a part for each picture where `<image>` stands.

    A row without a mark keeps its pictures before its first question.

    Raises:
        ShapeError: for another number of marks than of pictures, and for a mark where no picture can be.
    """
    talks = {name: row[name] for name in _TALKS if row.get(name) is not None}
    if not any(_MARK in str(value) for value in (*talks.values(), row.get("text"))):
        return talks
    if any(isinstance(value, str) for value in (*talks.values(), row.get("text"))):
        raise ShapeError(
            f"Plain text marks the place of a picture by '{_MARK}', which turns alone have; "
            '`system_prompt: ""` makes turns of a prompt and its answers.'
        )
    name = next(name for name in PICTURES if name in row)
    pictures = row[name] if name == "images" else [row[name]]
    made = {key: [_in_parts(turn) for turn in turns] for key, turns in talks.items()}
    asked = [made["prompt"]] if "prompt" in made else list(made.values())
    for turns in asked:
        marks = sum(_is_place(part) for turn in turns for part in turn["content"])
        if marks != len(pictures or ()):
            raise ShapeError(
                f"Marks '{_MARK}' in the text: {marks}, pictures in `{name}`: {len(pictures or ())}. Give a mark for "
                "each picture, or none."
            )
    return made


def _in_parts(turn: Turn) -> Turn:
    """A turn whose content is a list of parts: its text, cut at the marks, and pictures between."""
    content = without_none(turn.get("content") or [])
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    made: list[dict[str, Any]] = []
    for part in parts:
        texts = re.split(f"({_MARK})", part["text"]) if part.get("type") == "text" else [part]
        made += [_part(text) for text in texts if text]
    if turn["role"] in ("assistant", "tool") and any(map(_is_place, made)):
        raise ShapeError(
            f"A turn of {turn['role']!r} has a picture or '{_MARK}'; the user's turns alone have pictures."
        )
    return {**without_none(turn), "content": made}


def _part(text: Any) -> dict[str, Any]:
    if not isinstance(text, str):
        return text
    return {"type": "image"} if text == _MARK else {"type": "text", "text": text}


def _is_place(part: Mapping[str, Any]) -> bool:
    """Whether a picture of the row goes here: TRL leaves parts that have their own."""
    return part.get("type") == "image" and "image" not in part
