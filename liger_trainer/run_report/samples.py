"""The completions that TRL has written while a policy trained (`log_completions`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from liger_trainer.pages import paragraph, section, table

_ROWS, _LETTERS = 8, 2000  # of each cell


def completions(folder: Path, step: int) -> str:
    """A section with the first completions of the last log, or nothing if none were logged.

    Args:
        folder: The run's `output_dir`, in which TRL writes ``completions/completions_STEP.parquet``.
        step: The run's; files of later steps are those of an earlier run.
    """
    files = {_step(path): path for path in (folder / "completions").glob("completions_*.parquet")}
    last = max((found for found in files if 0 <= found <= step), default=None)
    if last is None:
        return ""
    from pyarrow import parquet  # datasets needs it, so it is there

    rows: list[dict[str, Any]] = parquet.read_table(files[last]).to_pylist()
    columns = [name for name in (rows[0] if rows else {}) if name != "step"]
    shown = [[_shown(row[name]) for name in columns] for row in rows[:_ROWS]]
    words = f"{len(shown)} of the {len(rows)} completions that were logged at step {last}."
    return section("Samples", paragraph(words), table(columns, shown))


def _step(path: Path) -> int:
    number = re.fullmatch(r"completions_(\d+)\.parquet", path.name)
    return int(number.group(1)) if number else -1


def _shown(value: Any) -> object:
    if isinstance(value, list):  # messages
        value = "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in value if isinstance(turn, dict))
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= _LETTERS else f"{text[:_LETTERS]} … ({len(text)} letters)"
