"""Records as tables on the console, and what Markdown tables are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from liger_trainer.benchmarks.records import LongestRecord, Record, TrainingRecord
from liger_trainer.benchmarks.registry import family
from liger_trainer.benchmarks.training import OUT_OF_MEMORY, parse_lengths

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


def above_weights(record: TrainingRecord) -> float | None:
    """Peak memory above what is allocated before the first step, in GiB."""
    if record.peak_gibibytes is None or record.weights_gibibytes is None:
        return None
    return record.peak_gibibytes - record.weights_gibibytes


def outcome(record: TrainingRecord, above: bool = False, mfu: bool = True) -> str:
    """Tokens/s / peak GiB / GiB above the weights / MFU, as far as they are known and asked for; or the failure."""
    if record.tokens_per_second is None:
        return record.failure
    parts = [f"{record.tokens_per_second:,.0f}", number(record.peak_gibibytes, ".1f")]
    parts += [number(above_weights(record), ".1f")] if above else []
    parts += [percentage(record.mfu)] if mfu else []
    return " / ".join(filter(None, parts))


def training_table(records: list[TrainingRecord]) -> Table:
    """A table with a row for each provider of a task."""
    first = records[0]
    rate = "tokens/s" if first.gpus == 1 else "tokens/s/GPU"
    title = f"{_title(first)} · batch {_sizes(first)}"
    rate += ", no padding" if first.padding else ", with padding" if first.lengths else ""
    kept = any(record.kept_gibibytes is not None for record in records)
    headings = [rate, "MFU %", "peak GiB", "above weights", *["kept"] * kept, "first step s", "first loss", "last loss"]
    result = make_table(title, *headings)
    for record in records:
        losses = [f"{record.losses[end]:.4f}" for end in (0, -1)] if record.losses else ["", ""]
        result.add_row(
            record.provider,
            number(record.tokens_per_second, ",.0f"),
            number(None if record.mfu is None else 100 * record.mfu, ".1f"),
            number(record.peak_gibibytes, ".1f"),
            number(above_weights(record), ".1f"),
            *[number(record.kept_gibibytes, ".1f")] * kept,
            number(record.first_step_seconds, ".1f"),
            *losses,
            record.failure,
        )
    return result


def sweep_table(records: list[TrainingRecord]) -> Table:
    """A table over lengths, with a row per provider and number of GPUs: tokens/s per GPU, peak GiB, MFU.

    With several numbers of GPUs, also the tokens/s per GPU relative to the fewest GPUs, each with the same work.
    """
    first = records[0]
    lengths, rows = sweep(records)
    title = f"{_title(first, False)} · batch {first.batch} a GPU"
    result = make_table(title, *(f"{length:,}" for length in lengths), remark=False)
    for provider, cells in rows:
        result.add_row(provider, *cells)
    return result


def sweep(records: list[TrainingRecord]) -> tuple[list[int], list[tuple[str, list[str]]]]:
    """The lengths, and for each provider and number of GPUs a title and a cell for each length."""
    cases = {(record.provider, record.gpus, record.length): record for record in records}
    lengths = sorted({length for *_, length in cases})
    counts = sorted({gpus for _, gpus, _ in cases})
    rows = []
    for provider, gpus in dict.fromkeys((provider, gpus) for provider, gpus, _ in cases):
        title = f"{provider}, {gpus} GPU{'s' * (gpus > 1)}" if len(counts) > 1 else provider
        alone = [cases.get((provider, counts[0], length)) if gpus > counts[0] else None for length in lengths]
        here = [cases.get((provider, gpus, length)) for length in lengths]
        rows.append((title, [_cell(*pair) for pair in zip(here, alone)]))
    return lengths, rows


def line(record: TrainingRecord) -> str:
    """One record as a line, to show progress."""
    where = f", {record.gpus} GPUs" if record.gpus > 1 else ""
    return f"{record.provider}{where}, batch {_sizes(record)}: {_cell(record, None)}"


def _sizes(record: TrainingRecord) -> str:
    return f"{record.batch}" if record.lengths else f"{record.batch} × {record.length}"


def _cell(record: TrainingRecord | None, fewest: TrainingRecord | None) -> str:
    if record is None:
        return "–"
    if record.tokens_per_second is None or fewest is None or fewest.tokens_per_second is None:
        return "OOM" if record.failure == OUT_OF_MEMORY else outcome(record)
    share = 100 * record.tokens_per_second / fewest.tokens_per_second
    return f"{outcome(record)}, {share:.1f} % of {fewest.gpus}"


def rows_in_words(record: TrainingRecord) -> str:
    """What differs from bf16 weights and rows of one document of their length, of which every token has a label."""
    words = ["fp32 weights"] if record.dtype == "float32" else []
    words += [f"documents of {record.documents}"] if record.documents else []
    words += [f"{percentage(record.padding)} padding"] if record.padding else []
    words += [f"{percentage(record.labelled)} labelled"] if record.labelled < 1 else []
    words += [_lengths_in_words(record)] if record.lengths else []
    return ", ".join(words)


def _lengths_in_words(record: TrainingRecord) -> str:
    low, high = parse_lengths(record.lengths)
    tokens = f"{low} to {high}" if low < high else f"{low}"
    if not record.prompt:
        return f"rows of {tokens}"
    each = f"{record.group_size} completions each" if record.group_size else "completions"
    return f"prompts of {record.prompt}, {each} of {tokens}"


def _title(record: TrainingRecord, gpus: bool = True) -> str:
    layers = f", {record.layers} layers" if record.layers else ""
    parts = [f"{record.model}{layers}", record.trainer, *filter(None, [rows_in_words(record)])]
    base = f" on {record.quantize}" if record.quantize else ""
    parts += [f"LoRA r={record.lora}{base}"] if record.lora else []
    parts += [f"{record.gpus} GPU{'s' * (record.gpus > 1)}"] if gpus and record.accelerate_config else []
    parts += [record.accelerate_config] if record.accelerate_config else []
    sharing = {"experts": record.expert_parallel, "sequences": record.context_parallel}
    parts += [f"{what} shared by {size}" for what, size in sharing.items() if size > 1]
    return " · ".join([*parts, "every layer checkpointed" if record.checkpointing else "nothing checkpointed"])


def longest_table(records: list[LongestRecord]) -> Table:
    """A table with a row for each provider of a task."""
    first = records[0]
    lora = f" · LoRA r={first.lora}" if first.lora else ""
    title = f"{first.model} · {first.trainer}{lora} · batch {first.batch} · the longest that trains"
    result = make_table(title, "tokens", "too long", "tokens/s", "peak GiB", remark=False)
    for record in records:
        rate, peak = number(record.tokens_per_second, ",.0f"), number(record.peak_gibibytes, ".1f")
        result.add_row(record.provider, f"{record.length:,}", number(record.too_long, ","), rate, peak)
    return result
