"""End-to-end training steps: every provider in its own processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from liger_trainer.benchmarks.records import TrainingRecord
from liger_trainer.benchmarks.report import make_table, number, percentage
from liger_trainer.benchmarks.training_process import OUT_OF_MEMORY, ProcessError, TrainingProcess
from liger_trainer.benchmarks.training_task import Task


def run_lengths(
    task: Task, lengths: list[int], provider: str, provider_file: Path | None = None, seconds: float = 600.0
) -> Iterator[TrainingRecord]:
    """Measures one provider on each length in turn, in the same processes; yields each record when it is complete.

    The first failure is the last record: a longer sequence would fail too.

    Args:
        task: What is trained; its own length is ignored.
        lengths: Tokens in a sequence, in ascending order.
        provider: Its name.
        provider_file: A Python file that registers more providers.
        seconds: Time limit of a length; that of the first includes starting the processes.
    """
    with TrainingProcess(task, lengths, provider, provider_file) as process:
        for length in lengths:
            record = _record(dataclasses.replace(task, length=length), provider)
            try:
                yield dataclasses.replace(record, **process.result(seconds))
            except ProcessError as error:
                record.failure = str(error)
                yield record
                return


def run_provider(
    task: Task, provider: str, provider_file: Path | None = None, seconds: float = 600.0
) -> TrainingRecord:
    """[`run_lengths`] on the task's own length."""
    (record,) = run_lengths(task, [task.length], provider, provider_file, seconds)
    return record


def _record(task: Task, provider: str) -> TrainingRecord:
    return TrainingRecord(
        task.model,
        task.layers,
        task.trainer,
        task.batch,
        task.length,
        task.checkpointing,
        provider,
        lora=task.lora,
        gpus=task.gpus,
        accelerate_config=Path(task.accelerate_config).stem,
        quantize=task.quantize,
    )


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


def table(records: list[TrainingRecord]) -> Table:
    """A table with a row for each provider of a task."""
    first = records[0]
    rate = "tokens/s" if first.gpus == 1 else "tokens/s/GPU"
    title = f"{_title(first)} · batch {first.batch} × {first.length}"
    result = make_table(title, rate, "MFU %", "peak GiB", "above weights", "first loss", "last loss")
    for record in records:
        losses = [f"{record.losses[end]:.4f}" for end in (0, -1)] if record.losses else ["", ""]
        result.add_row(
            record.provider,
            number(record.tokens_per_second, ",.0f"),
            number(None if record.mfu is None else 100 * record.mfu, ".1f"),
            number(record.peak_gibibytes, ".1f"),
            number(above_weights(record), ".1f"),
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
    return f"{record.provider}{where}, {record.batch} × {record.length}: {_cell(record, None)}"


def _cell(record: TrainingRecord | None, fewest: TrainingRecord | None) -> str:
    if record is None:
        return "–"
    if record.tokens_per_second is None or fewest is None or fewest.tokens_per_second is None:
        return "OOM" if record.failure == OUT_OF_MEMORY else outcome(record)
    share = 100 * record.tokens_per_second / fewest.tokens_per_second
    return f"{outcome(record)}, {share:.1f} % of {fewest.gpus}"


def _title(record: TrainingRecord, gpus: bool = True) -> str:
    layers = f", {record.layers} layers" if record.layers else ""
    parts = [f"{record.model}{layers}", record.trainer]
    base = f" on {record.quantize}" if record.quantize else ""
    parts += [f"LoRA r={record.lora}{base}"] if record.lora else []
    parts += [f"{record.gpus} GPU{'s' * (record.gpus > 1)}"] if gpus and record.accelerate_config else []
    parts += [record.accelerate_config] if record.accelerate_config else []
    return " · ".join([*parts, "every layer checkpointed" if record.checkpointing else "nothing checkpointed"])
