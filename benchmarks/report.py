"""Records as tables: of one case on the console, and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from liger_trainer.benchmarks.records import Record, TrainingRecord
from liger_trainer.benchmarks.registry import family

Shown = TypeVar("Shown", Record, TrainingRecord)


def make_console() -> Console:
    """A console wide enough for the tables."""
    return Console(width=None if Console().is_terminal else 160, highlight=False)


def number(value: float | None, form: str, missing: str = "") -> str:
    """`value` in a format; `missing` for None."""
    return missing if value is None else format(value, form)


def percentage(share: float | None, missing: str = "") -> str:
    """A share as a whole percentage; `missing` for None."""
    return missing if share is None else f"{100 * share:.0f} %"


def make_table(title: str, *headings: str, remark: bool = True) -> Table:
    """An empty table with a column of providers, one for each heading, and one for remarks."""
    table = Table(title=title, title_justify="left")
    table.add_column("provider", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    if remark:
        table.add_column("remark", overflow="fold")
    return table


def with_settings(records: Iterable[Shown], library: str, show: Callable[[Shown], str], bold: Shown | None) -> str:
    """The records of a library as the cell of a Markdown table, each with its settings."""
    texts = []
    for record in records:
        text = f"**{show(record)}**" if record is bold else show(record)
        setting = record.provider.removeprefix(library).strip()
        texts.append(f"{text} with `{setting}`" if setting else text)
    return "; ".join(texts) or "–"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    rule = "|" + "---|" * len(header)
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]])


def milliseconds(value: float | None) -> str:
    """Four significant digits, or three below a millisecond."""
    return number(value, ".1f" if value and value >= 100 else ".2f" if value and value >= 10 else ".3f")


def _skipped(records: Sequence[Record]) -> str | None:
    """The providers that were skipped, and why; a library is named once if all its settings were skipped."""
    measured = {family(record.provider) for record in records if record.both is not None}
    reasons: dict[str, dict[str, None]] = {}
    for record in records:
        if record.skipped:
            library = family(record.provider)
            name = record.provider if library in measured else library
            reasons.setdefault(record.failure.removeprefix("skipped: "), {})[name] = None
    return "skipped: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()) if reasons else None


def table(records: Sequence[Record], mode: str = "both") -> Table:
    """A table of the records of one case, with a row per provider.

    Args:
        records: Measured in turns.
        mode: Which time the percentage of the floor refers to: ``"forward"``, ``"backward"`` or ``"both"``.
    """
    first = records[0]
    title = " · ".join(filter(None, (first.operation, first.variant, first.model, first.shape, first.dtype)))
    floor = first.floor if mode == "both" else getattr(first, f"{mode}_floor")
    if floor is not None:
        title += f" · floor {milliseconds(floor)} ms"
    headings = ["forward ms", "backward ms", "both ms", "± ms", "% of floor"]
    result = make_table(title, *headings, "GiB", "saved", "gradient error", "× eager")
    result.caption, result.caption_justify = _skipped(records), "left"
    for record in records:
        if record.skipped:
            continue
        result.add_row(
            record.provider,
            milliseconds(record.forward),
            milliseconds(record.backward),
            milliseconds(record.both),
            milliseconds(getattr(record, f"{mode}_spread")),
            percentage(record.fraction_of_floor(mode)).removesuffix(" %"),
            number(record.peak_gibibytes, ".2f"),
            number(record.saved_gibibytes, ".2f"),
            number(record.gradient_error(), ".1e"),
            number(record.worse_than_eager, ".2f"),
            Text(record.failure or record.remark),
        )
    return result
