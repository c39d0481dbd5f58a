"""The longest sequence that trains, to within an eighth.

Every attempt runs in a new process, so that one that runs out of memory cannot affect the next.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from rich.table import Table

from liger_trainer.benchmarks.records import LongestRecord, TrainingRecord
from liger_trainer.benchmarks.report import make_table, number
from liger_trainer.benchmarks.training import OUT_OF_MEMORY, Task, run_provider


def search(trains: Callable[[int], bool], start: int) -> None:
    """Searches for the longest length for which `trains` is true, to within an eighth.

    From `start`, lengths are doubled or halved until one trains and twice that does not; bisection follows.

    Args:
        trains: Tries a length. An exception ends the search.
        start: The first length, in tokens.
    """
    good, bad = start, start
    if trains(start):
        while trains(bad := 2 * good):
            good = bad
    else:
        while (good := bad // 2) and not trains(good):
            bad = good
    while bad - good > max(good // 8, 1):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if trains(middle) else (good, middle)


class OutOfTime(Exception):
    """Ends the search; results so far are kept."""


def find_longest(
    task: Task,
    provider: str,
    provider_file: Path | None = None,
    seconds: float = 540.0,
    tell: Callable[[str], None] = print,
) -> LongestRecord:
    """Searches for one provider.

    Args:
        task: The work; its length is tried first.
        provider: Name of the provider.
        provider_file: A Python file that registers more providers.
        seconds: Time limit of all attempts together; the attempt that reaches it is ended and not counted.
        tell: Called with the outcome of every attempt.
    """
    record = LongestRecord(task.model, task.layers, task.trainer, task.batch, task.lora, provider)
    deadline = time.monotonic() + seconds

    def trains(length: int) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        begun = time.monotonic()
        found = run_provider(dataclasses.replace(task, length=length), provider, provider_file, left)
        record.tries[str(length)] = outcome = _outcome(found)
        tell(f"{provider}: {length} tokens, {outcome} ({time.monotonic() - begun:.0f} s)")
        if not found.failure:
            record.length = length
            record.tokens_per_second, record.peak_gibibytes = found.tokens_per_second, found.peak_gibibytes
        elif found.failure == OUT_OF_MEMORY:
            record.too_long = length
        else:  # this does not show what would fit
            raise OutOfTime
        return not found.failure

    try:
        search(trains, task.length)
    except OutOfTime:
        tell(f"{provider}: ended early")
    return record


def _outcome(found: TrainingRecord) -> str:
    memory = "" if found.peak_gibibytes is None else f", {found.peak_gibibytes:.1f} GiB"
    return found.failure or f"trains, {number(found.tokens_per_second, ',.0f')} tokens/s{memory}"


def table(records: list[LongestRecord]) -> Table:
    """A table with a row for each provider of a task."""
    first = records[0]
    lora = f" · LoRA r={first.lora}" if first.lora else ""
    title = f"{first.model} · {first.trainer}{lora} · batch {first.batch} · the longest that trains"
    result = make_table(title, "tokens", "too long", "tokens/s", "peak GiB", remark=False)
    for record in records:
        result.add_row(
            record.provider,
            f"{record.length:,}",
            number(record.too_long, ","),
            number(record.tokens_per_second, ",.0f"),
            number(record.peak_gibibytes, ".1f"),
        )
    return result
