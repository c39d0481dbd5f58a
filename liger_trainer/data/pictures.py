"""Pictures beside a conversation: the files that rows name, and the places that the text marks.

TRL takes a list of pictures in `images`. It puts them before the first turn of the user, unless the contents of turns
are lists of parts that say where each is. Data of LLaVA and LLaMA-Factory says so by `<image>` in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from datasets import Dataset

from liger_trainer.data.shapes import PICTURES, ShapeError
from liger_trainer.data.turns import Turn, parsed, without_none
from liger_trainer.errors import UserError

_MARK = "<image>"
_NO_PATH = ("http://", "https://", "data:")
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


class PictureError(UserError):
    """A picture that is not there, or is none; the text ends a sentence on its row."""


def listed(value: Any, folders: Sequence[str]) -> list[Any]:
    """The pictures of a row as a list, with files in place of paths.

    Args:
        value: A picture, a list of them, the JSON text of these, or None. A picture is a path, ``~`` and ``file://``
            included, alone or as ``{"path": ...}``; a URL; base64; or what `datasets` has decoded, which stays.
        folders: Where paths begin, the first that has the file before the others.

    Raises:
        PictureError: for a path that leads nowhere, and for what is no picture.
    """
    value = parsed(value)
    pictures = value if isinstance(value, list) else [] if value is None else [value]
    return [_file_of(picture, folders) for picture in pictures]


def _file_of(picture: Any, folders: Sequence[str]) -> Any:
    if isinstance(picture, Mapping) and "bytes" not in picture and isinstance(picture.get("path"), str):
        return _file_of(picture["path"], folders)
    if (
        picture is None
        or isinstance(picture, list | int | float)
        or (isinstance(picture, Mapping) and "bytes" not in picture)
    ):
        raise PictureError(f"has {json.dumps(picture)[:40]} for a picture; give a path, a URL or base64.")
    if not isinstance(picture, str) or picture.startswith(_NO_PATH) or len(picture) > 1024:  # base64
        return picture
    named = unquote(urlsplit(picture).path) if picture.startswith("file://") else picture
    path = Path(named).expanduser()
    file = next((found for folder in folders if (found := Path(folder, path)).is_file()), None)
    if file is None:
        raise PictureError(f"has the picture {picture!r}, which is not in {' or in '.join(folders)}.")
    return str(file)
