"""Files of data: found by name, pattern or folder, and read as one dataset."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import functools
import glob
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, List, Value, load_dataset

from liger_trainer._version import __version__
from liger_trainer.data.turns import parsed
from liger_trainer.errors import UserError

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".csv": ("csv", {"sep": ",", "keep_default_na": False, "na_values": [""]}),
    ".tsv": ("csv", {"sep": "\t", "keep_default_na": False, "na_values": [""]}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".txt": ("text", {}),
}
"""Ends of names, each with the reader of `datasets` and its options. Cells such as "None" and "NA" are text."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zip")
"""Ends that may follow those in `KINDS`."""

PICTURES = ("image", "images")
"""The columns of pictures: one, or a list of them."""

_NO_PATH = ("http://", "https://", "data:")
_BLANK = b" \t\r\n\xef\xbb\xbf"  # with a byte order mark


class FileError(UserError):
    """Files that are not there or cannot be read; the text names the key of the recipe."""


@dataclasses.dataclass(frozen=True)
class OfThisVersion:
    """A function of rows whose cached results another version of ours does not take.

    `datasets` caches what a function makes, and knows a function of a package by its name alone.
    """

    function: Callable[..., dict[str, Any]]
    version: str = __version__

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The result of the function."""
        return self.function(*args, **kwargs)


def suffix(path: str | Path) -> str:
    """The end of a name that says what the file holds, in lower case; empty if it says nothing known."""
    ends = [end.lower() for end in Path(path).suffixes]
    ends = ends[:-1] if ends and ends[-1] in COMPRESSED else ends
    return ends[-1] if ends and ends[-1] in KINDS else ""


def find_files(given: Sequence[str], key: str) -> list[str]:
    """The files that a list of names, patterns and folders stands for, each once.

    Args:
        given: Files; patterns such as ``data/*.jsonl``, where ``**`` stands for any folders; folders, of which all
            files that `KINDS` names are taken, those in folders within too.
        key: The key of the recipe, for errors.

    Raises:
        FileError: for one that stands for no file.
    """
    found: list[str] = []
    for name in given:
        path = Path(name).expanduser()
        if path.is_dir():
            files = sorted(str(file) for file in path.rglob("*") if _is_data(file, path))
            hint = f"the folder {name!r} holds no file that ends in {', '.join(KINDS)}"
        elif path.is_file():
            files, hint = [str(path)], ""
        else:
            files = sorted(file for file in glob.glob(str(path), recursive=True) if Path(file).is_file())
            hint = f"there is no file {name!r} (relative to {Path.cwd()})"
        if not files:
            raise FileError(f"`{key}`: {hint}.")
        found += files
    return list(dict.fromkeys(found))


def _is_data(file: Path, folder: Path) -> bool:
    """Whether a file of a folder is taken: hidden ones are those of an editor, a notebook or a system."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.is_file() and bool(suffix(file)) and not hidden


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Hides what `datasets` logs of an error that it raises too."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


@_unlogged()
def load_files(given: Sequence[str], key: str, is_text: Callable[[str], bool]) -> Dataset:
    """The rows of all files that `given` stands for, as one dataset.

    Paths of pictures are found from the working directory, or from the folder of a file.

    Args:
        given: As in `find_files`.
        key: The key of the recipe, for errors.
        is_text: Whether a column of this name holds text, though the cells of a table may look like numbers.

    Raises:
        FileError: for files that are missing, empty, of several kinds or with several columns, or cannot be read; for
            pictures that are missing.
    """
    files = find_files(given, key)
    empty = [file for file in files if Path(file).stat().st_size == 0]
    if empty:
        raise FileError(f"`{key}`: {empty[0]!r} is empty.")
    kinds = {suffix(file) for file in files}
    readers = {KINDS[kind][0] for kind in kinds if kind}
    if "" in kinds or len(readers) != 1 or len({".csv", ".tsv"} & kinds) > 1:
        shown = ", ".join(files[:3]) + (", ..." if len(files) > 3 else "")
        raise FileError(
            f"`{key}` stands for {shown}; give files of one kind: {', '.join(KINDS)}, each compressed or not "
            f"({', '.join(COMPRESSED)})."
        )
    reader, options = KINDS[min(kinds)]
    if reader == "json":
        options = {"field": _field(files)}
    try:
        if reader == "csv":
            columns = _first_row(files[0], reader, options)
            options = {**options, "converters": {name: _cell for name in columns if is_text(name)}}
        loaded = load_dataset(reader, data_files=[*map(glob.escape, files)], split="train", **options)
        loaded.data.validate(full=True)  # the JSON lines reader accepts text that is not UTF-8
    except Exception as error:  # datasets raises its own errors, chained to those of the file's reader
        difference = _difference(files, reader, options)
        if difference:
            raise FileError(f"`{key}`: {difference}") from error
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        if "no data" in reason:
            raise FileError(f"`{key}`: {files} hold no rows.") from error
        hint = " Save the text as UTF-8." if "utf" in reason.lower() or any(map(_is_utf16, files)) else ""
        raise FileError(f"`{key}`: {files} cannot be read: {reason}{hint}") from error
    if "__index_level_0__" in loaded.column_names and reader == "csv":  # pandas took the first column for names of rows
        raise FileError(
            f"`{key}`: rows of {files} have more cells than the first row; put cells with commas in quotes."
        )
    folders = [str(folder) for folder in dict.fromkeys([Path.cwd(), *(Path(file).resolve().parent for file in files)])]
    return _with_files(loaded, folders, key)


def _with_files(rows: Dataset, folders: Sequence[str], key: str) -> Dataset:
    """`rows` with their pictures in a list, `images`, whose paths lead to files; rows without pictures as they are."""
    names = [name for name in PICTURES if name in rows.column_names]
    if not names:
        return rows
    if len(names) > 1:
        raise FileError(f"`{key}` has pictures in `image` and in `images`; leave one of the columns out.")
    find = OfThisVersion(functools.partial(_listed, name=names[0], folders=folders, key=key))
    feature = rows.features[names[0]]
    one = getattr(feature, "feature", feature)
    of_text = isinstance(one, Value) and one.dtype in ("string", "large_string", "null")
    features = rows.features.copy()
    del features[names[0]]
    features["images"] = List(Value("string") if of_text else one)
    return rows.map(find, with_indices=True, remove_columns=names, features=features, desc="Finding the pictures")


def _listed(row: Mapping[str, Any], index: int, name: str, folders: Sequence[str], key: str) -> dict[str, list[Any]]:
    value = parsed(row[name])
    pictures = value if isinstance(value, list) else [] if value is None else [value]
    return {"images": [_file_of(each, folders, f"`{key}`: row {index + 1}") for each in pictures]}


def _file_of(picture: Any, folders: Sequence[str], where: str) -> Any:
    """A picture's file, from the first of `folders` that has it; what is no path stays as it is."""
    if not isinstance(picture, str) or picture.startswith(_NO_PATH) or len(picture) > 1024:  # base64
        return picture
    file = next((path for folder in folders if (path := Path(folder, picture)).is_file()), None)
    if file is None:
        raise FileError(f"{where} has the picture {picture!r}, which is not in {' or in '.join(folders)}.")
    return str(file)


def _cell(text: str) -> str | None:
    return text or None


def _is_utf16(file: str) -> bool:
    with open(file, "rb") as stream:
        return stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def _first_row(file: str, reader: str, options: dict[str, Any]) -> dict[str, Any]:
    return next(
        iter(load_dataset(reader, data_files=[glob.escape(file)], split="train", streaming=True, **options)), {}
    )


def _difference(files: Sequence[str], reader: str, options: dict[str, Any]) -> str:
    """Says which file has other columns than the first, or other types; empty if none has, or one cannot be read."""
    first: dict[str, Any] = {}
    for file in files:
        try:
            row = _first_row(file, reader, options)
        except Exception:  # of any reader, which was raised before
            return ""
        first = first or row
        if row.keys() != first.keys():
            columns = f"the columns {', '.join(first)}, and {file!r} {', '.join(row)}"
            return f"{files[0]!r} has {columns}; give files with the same columns."
        for name, value in row.items():
            kinds = [type(each).__name__ for each in (first[name], value)]
            if kinds[0] != kinds[1] and "NoneType" not in kinds:
                return f"`{name}` holds {kinds[0]} in {files[0]!r} and {kinds[1]} in {file!r}; give one type."
    return ""


def _field(files: Sequence[str]) -> str | None:
    """The one key of JSON files that hold a mapping with one list of rows, such as ``{"data": [...]}``."""
    fields = {_only_list(file) for file in files}
    return fields.pop() if len(fields) == 1 else None


def _only_list(file: str) -> str | None:
    with open(file, "rb") as stream:
        start = stream.read(4096).strip(_BLANK)
        if not start.startswith(b"{") or suffix(file) != ".json" or Path(file).suffix.lower() in COMPRESSED:
            return None
    try:
        held = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (ValueError, OSError):  # such as one row a line
        return None
    lists = [key for key, value in held.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return lists[0] if len(lists) == 1 else None
