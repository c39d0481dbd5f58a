"""Files of data: found by name, pattern or folder, and read as one dataset."""

from __future__ import annotations

import codecs
import contextlib
import functools
import glob
import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, Features, Image, List, Value, load_dataset

from liger_trainer._version import __version__
from liger_trainer.data.json_files import ROW, holds_lists, problem, rows_key, text_stays_text
from liger_trainer.data.pictures import PictureError, listed
from liger_trainer.data.shapes import PICTURES
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

_Places = list[tuple[str, int]]


class FileError(UserError):
    """Files that are not there or cannot be read; the text names the key of the recipe."""


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

    Paths of pictures are found from the folder of their row's file, or from the working directory.

    Args:
        given: As in `find_files`.
        key: The key of the recipe, for errors.
        is_text: Whether a column of a table of this name holds text; another holds numbers.

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
        options = {"field": rows_key(files)}
        lists = next(filter(holds_lists, files), None)
        if lists is not None:
            raise FileError(f"`{key}`: the rows of {lists!r} are lists; a row is a mapping such as {ROW}.")
    try:
        more = {"features": _features(files, reader, options, is_text, key)} if reader == "csv" else {}
        with text_stays_text() if reader == "json" else contextlib.nullcontext():
            loaded = load_dataset(
                reader, _digest(files), data_files=[*map(glob.escape, files)], split="train", **options, **more
            )
        loaded.data.validate(full=True)  # the JSON lines reader accepts text that is not UTF-8
    except FileError:
        raise
    except Exception as error:  # datasets raises its own errors, chained to those of the file's reader
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        if "no data" in reason or "Empty JSON" in reason:
            raise FileError(f"`{key}`: {files} hold no rows.") from error
        difference = _difference(files, reader, options) if reader != "csv" else ""
        if difference:
            raise FileError(f"`{key}`: {difference}") from error
        reason = problem(files) or reason if reader == "json" else _too_wide(reason)
        hint = " Save the text as UTF-8." if "utf" in reason.lower() or any(map(_is_utf16, files)) else ""
        raise FileError(f"`{key}`: {files} cannot be read: {reason}{hint}") from error
    if not {*PICTURES} & {*loaded.column_names}:
        return loaded
    return _with_files(loaded, _places(files, loaded, reader, options), key)


def _with_files(rows: Dataset, places: _Places, key: str) -> Dataset:
    """`rows` with their pictures in a list, `images`, whose paths lead to files."""
    names = [name for name in PICTURES if name in rows.column_names]
    if len(names) > 1:
        raise FileError(f"`{key}` has pictures in `image` and in `images`; leave one of the columns out.")
    features = rows.features.copy()
    feature = features.pop(names[0])
    one = getattr(feature, "feature", feature)
    is_decoded = isinstance(one, Image) or (isinstance(one, Mapping) and "bytes" in one)
    features["images"] = List(one if is_decoded else Value("string"))
    found = "" if is_decoded else _found(rows, names[0], places, key)
    find = functools.partial(_listed, name=names[0], places=places, found=found)
    return rows.map(find, with_indices=True, remove_columns=names, features=features, desc="Finding the pictures")


def _found(rows: Dataset, name: str, places: _Places, key: str) -> str:
    """A digest of the files of all pictures: what is cached holds only while they are where they were."""
    digest = hashlib.sha256()
    for index, row in enumerate(rows.select_columns([name])):
        try:
            digest.update(repr(_listed(row, index, name, places)).encode())
        except PictureError as error:
            raise FileError(f"`{key}`: row {index + 1} {error}") from error
    return digest.hexdigest()


def _listed(row: Mapping[str, Any], index: int, name: str, places: _Places, found: str = "") -> dict[str, list[Any]]:
    """The pictures of a row; `found` is part of the key of what is cached."""
    folder = next(folder for folder, end in places if index < end)
    return {"images": listed(row[name], list(dict.fromkeys([folder, str(Path.cwd())])))}


def _places(files: Sequence[str], rows: Dataset, reader: str, options: dict[str, Any]) -> _Places:
    """The folders of the files, each with the index of the row after its last one."""
    groups = [
        (folder, [*group]) for folder, group in itertools.groupby(files, lambda file: Path(file).resolve().parent)
    ]
    places, end = [], 0
    for folder, group in groups:
        end = len(rows) if (folder, group) == groups[-1] else end + _count(group, reader, options)
        places.append((str(folder), end))
    return places


def _count(files: Sequence[str], reader: str, options: dict[str, Any]) -> int:
    streamed = load_dataset(
        reader, data_files=[*map(glob.escape, files)], split="train", streaming=True, **options
    ).with_format("arrow")
    return sum(len(table) for table in streamed.iter(batch_size=1000))


def _digest(files: Sequence[str]) -> str:
    """What the rows are cached by, beside the names of files: `datasets` goes by when they were written."""
    digest = hashlib.sha256(__version__.encode())
    for file in files:
        with open(file, "rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()[:32]


def _features(
    files: Sequence[str], reader: str, options: dict[str, Any], is_text: Callable[[str], bool], key: str
) -> Features:
    """The columns of tables: cells are text as it is written, or numbers."""
    first: dict[str, Any] = {}
    for file in files:
        row = _first_row(file, reader, options)
        if "__index_level_0__" in row:  # pandas took the first column for names of rows
            raise FileError(
                f"`{key}`: rows of {file!r} have more cells than the first row; put cells with commas in quotes."
            )
        first = first or row
        if row and row.keys() != first.keys():
            raise FileError(f"`{key}`: {_other_columns(files[0], first, file, row)}")
    if not first:
        raise FileError(f"`{key}`: {files} hold no rows.")
    return Features({name: Value("string" if is_text(name) else "float64") for name in first})


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
            return _other_columns(files[0], first, file, row)
        for name, value in row.items():
            kinds = [type(each).__name__ for each in (first[name], value)]
            if kinds[0] != kinds[1] and "NoneType" not in kinds:
                return f"`{name}` holds {kinds[0]} in {files[0]!r} and {kinds[1]} in {file!r}; give one type."
    return ""


def _other_columns(one: str, first: Mapping[str, Any], file: str, row: Mapping[str, Any]) -> str:
    columns = f"the columns {', '.join(first)}, and {file!r} {', '.join(row)}"
    return f"{one!r} has {columns}; give files with the same columns."


def _too_wide(reason: str) -> str:
    found = re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", reason)
    if found is None:
        return reason
    first, line, cells = found.groups()
    return f"line {line} has {cells} cells, and the first line {first}; put cells with commas in quotes."
