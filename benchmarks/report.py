"""Records as tables: of one case on the console, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from liger_trainer.benchmarks.records import Record
from liger_trainer.benchmarks.registry import family


def make_console() -> Console:
    """A console wide enough for the tables."""
    return Console(width=None if Console().is_terminal else 160, highlight=False)


def number(value: float | None, form: str) -> str:
    """`value` in a format; empty for None."""
    return "" if value is None else format(value, form)


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
    result = Table(title=title, title_justify="left")
    result.add_column("provider", no_wrap=True)
    for heading in (
        "forward ms",
        "backward ms",
        "both ms",
        "± ms",
        "% of floor",
        "GiB",
        "saved",
        "gradient error",
        "× eager",
    ):
        result.add_column(heading, justify="right")
    result.add_column("remark", overflow="fold")
    result.caption, result.caption_justify = _skipped(records), "left"
    for record in records:
        if record.skipped:
            continue
        fraction = record.fraction_of_floor(mode)
        result.add_row(
            record.provider,
            milliseconds(record.forward),
            milliseconds(record.backward),
            milliseconds(record.both),
            milliseconds(getattr(record, f"{mode}_spread")),
            "" if fraction is None else f"{100 * fraction:.0f}",
            number(record.peak_gibibytes, ".2f"),
            number(record.saved_gibibytes, ".2f"),
            number(record.gradient_error(), ".1e"),
            number(record.worse_than_eager, ".2f"),
            Text(record.failure or record.remark),
        )
    return result
