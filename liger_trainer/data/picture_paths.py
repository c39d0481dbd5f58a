"""Pictures that rows name by paths, found beside the file of the row or in the working directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from liger_trainer.data.turns import parsed
from liger_trainer.errors import UserError

_NO_PATH = ("http://", "https://", "data:")


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
