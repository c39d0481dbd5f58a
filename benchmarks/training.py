"""Training steps from end to end: every provider in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from liger_trainer.benchmarks.records import TrainingRecord
from liger_trainer.benchmarks.report import number

if TYPE_CHECKING:
    from liger_trainer.benchmarks.training_step import Task

OUT_OF_MEMORY = "out of memory"


def run_provider(
    task: Task, provider: str, provider_file: Path | None = None, seconds: float = 600.0
) -> TrainingRecord:
    """Measures one provider.

    Args:
        task: What is trained.
        provider: Its name.
        provider_file: A Python file that registers providers of its own.
        seconds: After which it is given up.
    """
    sizes = (task.model, task.layers, task.trainer, task.batch, task.length, task.checkpointing)
    record = TrainingRecord(*sizes, provider, lora=task.lora, quantize=task.quantize)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = [json.dumps(dataclasses.asdict(task)), provider, str(result)]
        arguments += [] if provider_file is None else [str(provider_file)]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "liger_trainer.benchmarks.training_step", *arguments],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            record.failure = f"no result in {seconds:.0f} s"
            return record
        if done.returncode or not result.is_file():
            record.failure = _reason(done.stderr, done.returncode)
            return record
        return dataclasses.replace(record, **json.loads(result.read_text(encoding="utf-8")))


def _reason(errors: str, code: int) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    if "OutOfMemoryError" in errors or "CUDA error: out of memory" in errors:  # the latter of pinned memory
        return OUT_OF_MEMORY
    # A traceback ends with the error; its message may go on for lines.
    starts = [line for line in lines if line[:1].isalpha() and "Error" in line.split(":")[0]]
    return (starts[-1] if starts else lines[-1] if lines else f"exit code {code}")[:120]


def above_weights(record: TrainingRecord) -> float | None:
    """GiB at the peak beyond what the model takes before its first step."""
    if record.peak_gibibytes is None or record.weights_gibibytes is None:
        return None
    return record.peak_gibibytes - record.weights_gibibytes


def table(records: list[TrainingRecord]) -> Table:
    """The providers of one task, a line each."""
    first = records[0]
    layers = f", {first.layers} layers" if first.layers else ""
    checkpointed = "every layer checkpointed" if first.checkpointing else "nothing checkpointed"
    lora = f" · LoRA r={first.lora}" if first.lora else ""
    lora += f" on {first.quantize}" if first.quantize else ""
    sizes = f"{first.batch} × {first.length}"
    result = Table(
        title=f"{first.model}{layers} · {first.trainer}{lora} · batch {sizes} · {checkpointed}",
        title_justify="left",
    )
    result.add_column("provider", no_wrap=True)
    for heading in ("tokens/s", "MFU %", "peak GiB", "above weights", "first loss", "last loss"):
        result.add_column(heading, justify="right")
    result.add_column("remark", overflow="fold")
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
