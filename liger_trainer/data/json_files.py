"""JSON files: where their rows are, what is wrong with them, and a reader for which text stays text.

That of `datasets` makes dates, numbers and null of some text. Arrow takes a column of text for times if all of it looks
like times, at any depth. Columns of several kinds are kept as JSON, where the text `42` becomes the number. pandas,
which reads what is not one row a line, looks for dates too.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import fsspec
import pandas
import pyarrow
import pyarrow.json

from liger_trainer.compat.datasets import JSON_TEXT
from liger_trainer.compat.private import require
from liger_trainer.data.shapes import holds_text
from liger_trainer.data.turns import is_conversation

ROW = '{"prompt": "...", "completion": "..."}'
"""A row as messages show it."""

_BLANK = b" \t\r\n\xef\xbb\xbf"  # with a byte order mark


@contextlib.contextmanager
def text_stays_text() -> Iterator[None]:
    """Within it, `datasets` reads JSON files with text as text."""
    require(JSON_TEXT)
    reader = importlib.import_module("datasets.packaged_modules.json.json")
    encoding = importlib.import_module("datasets.utils.json")
    arrow = SimpleNamespace(read_json=_table, ReadOptions=pyarrow.json.ReadOptions)
    changes = [
        (reader, "paj", arrow),
        (reader, "pandas_read_json", _frame),
        (reader, "json_encode_field", _encoded),
        (encoding, "json_encode_field", _encoded),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, value in changes:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _table(source: Any, read_options: Any) -> pyarrow.Table:
    """The rows of JSON lines; where Arrow found times, they are read again."""
    table = pyarrow.json.read_json(source, read_options=read_options)
    schema = pyarrow.schema([_of_text(field) for field in table.schema])
    if schema.equals(table.schema):
        return table
    source.seek(0)
    parse_options = pyarrow.json.ParseOptions(explicit_schema=schema)
    return pyarrow.json.read_json(source, read_options=read_options, parse_options=parse_options)


def _frame(source: IO[str]) -> pandas.DataFrame:
    """The rows of JSON that is a list of them, or one row over several lines.

    Raises:
        ValueError: for what is neither, or has no rows.
    """
    held = json.loads(source.read().lstrip("\ufeff"))
    rows = held if isinstance(held, list) else [held]
    rows = [{"text": row} if isinstance(row, str) else row for row in rows]
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError("no data, or rows that are no mappings")
    lines = "\n".join(map(json.dumps, rows)).encode()
    options = pyarrow.json.ReadOptions(block_size=len(lines) + 1)
    return _table(io.BytesIO(lines), options).to_pandas(types_mapper=pandas.ArrowDtype)


def _of_text(field: pyarrow.Field) -> pyarrow.Field:
    kind = field.type
    if pyarrow.types.is_temporal(kind):
        return field.with_type(pyarrow.string())
    if pyarrow.types.is_list(kind):
        return field.with_type(pyarrow.list_(_of_text(kind.value_field)))
    if pyarrow.types.is_struct(kind):
        return field.with_type(pyarrow.struct([_of_text(each) for each in kind]))
    return field


def _encoded(example: Any, json_field_path: Sequence[str | int]) -> Any:
    """`example` with the value at a path as JSON; 0 in the path stands for every place of a list."""
    if example is None:
        return None
    if not json_field_path:
        return json.dumps(example, ensure_ascii=False)
    first, *rest = json_field_path
    if first == 0:
        return [_encoded(each, rest) for each in example]
    return {**example, first: _encoded(example.get(first), rest)}


def rows_key(files: Sequence[str]) -> str | None:
    """The one key of JSON files that hold a mapping with one list of rows, such as ``{"data": [...]}``."""
    keys = {_only_list(file) for file in files}
    return keys.pop() if len(keys) == 1 else None


def _only_list(file: str) -> str | None:
    if not _is_whole(file) or not _start(file).startswith(b"{"):
        return None
    try:
        held = _held(file)
    except ValueError:  # such as one row a line
        return None
    lists = [key for key, value in held.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    one_row = len(lists) == 1 and holds_text(lists[0]) and is_conversation(held[lists[0]])
    return lists[0] if len(lists) == 1 and not one_row else None


def holds_lists(file: str) -> bool:
    """Whether a file is a list of lists."""
    start = _start(file)
    return start.startswith(b"[") and start[1:].strip(_BLANK).startswith(b"[")


def problem(files: Sequence[str]) -> str:
    """Says which file is not JSON, or not one row a line, and where; empty if none is."""
    for file in files:
        with _unpacked(file) as stream:
            first = stream.readline().strip()
        if _is_whole(file) and not first.endswith(b"}"):
            try:
                _held(file)
            except ValueError as error:
                return f"{file!r} is not JSON: {error}."
        elif words := _broken_line(file):
            return words
    return ""


def _broken_line(file: str) -> str:
    with _unpacked(file) as stream:
        for number, line in enumerate(stream, 1):
            try:
                row = json.loads(line.decode("utf-8-sig")) if line.strip() else {}
            except ValueError as error:
                return f"line {number} of {file!r} is not JSON: {getattr(error, 'msg', error)}."
            if not isinstance(row, dict):
                return f"line {number} of {file!r} is a {type(row).__name__}, and must be a row such as {ROW}."
    return ""


def _is_whole(file: str) -> bool:
    """Whether a file may be one JSON value, by its name."""
    return ".json" in [end.lower() for end in Path(file).suffixes[-2:]]


def _held(file: str) -> Any:
    with _unpacked(file) as stream:
        return json.loads(stream.read().decode("utf-8-sig"))


def _start(file: str) -> bytes:
    with _unpacked(file) as stream:
        return bytes(stream.read(4096).strip(_BLANK))


def _unpacked(file: str) -> Any:
    return fsspec.open(file, "rb", compression="infer")
