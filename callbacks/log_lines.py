"""The progress bar of a recipe's run, with one terminal line for each log."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

# The most important first. Keys of an evaluation begin with `eval_`, those of the whole run with `train_`.
_WATCHED = {
    "loss": "loss",
    "reward": "reward",
    "rewards/accuracies": "accuracy",
    "accuracy": "accuracy",
    "rewards/margins": "margin",
    "mean_token_accuracy": "accuracy",
    "tokens_per_second": "tokens/s",
    "peak_memory_gib": "GiB",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "reward_std": "reward_std",
    "completions/mean_length": "length",
    "clip_ratio/region_mean": "clipped",
    "kl": "kl",
    "entropy": "entropy",
    "epoch": "epoch",
    "runtime": "runtime",
}
_WIDTH = 8
"""Characters of a number, so that the columns of a run stand below each other."""


class LogLinesCallback(ProgressCallback):
    """Shows as many numbers of each log as fit into a line; the Trainer's own callback shows a dictionary of all.

    The first log of a run decides which numbers its lines have. Where the output is no terminal, lines have all of the
    numbers that are watched. All numbers are in ``trainer_state.json`` and reach every reporter.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._columns: dict[str, dict[str, str]] = {}  # of training, evaluation and the end
        self._begun = (0, 0.0)  # step and time

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts the clock of the time that is left."""
        super().on_train_begin(args, state, control, **kwargs)
        self._begun = state.global_step, time.monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the line above the bar."""
        if not state.is_world_process_zero or self.training_bar is None:
            return
        logs = logs or {}
        kind = next((kind for kind in ("eval_", "train_") if any(name.startswith(kind) for name in logs)), "")
        if kind not in self._columns:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
            self._columns[kind] = columns_of(logs, width)
        line = log_line(logs, state.global_step, self._columns[kind])
        self.training_bar.write(line if kind else f"{line}{self._left(state)}")

    def _left(self, state: TrainerState) -> str:
        """The time that is left, from that of the steps so far."""
        first, start = self._begun
        done, more = state.global_step - first, state.max_steps - state.global_step
        if done < 1 or more < 1:
            return ""
        seconds = round((time.monotonic() - start) / done * more)
        return f"  {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"


def columns_of(logs: Mapping[str, Any], width: int) -> dict[str, str]:
    """The numbers in `logs` for which a line of `width` characters has room, the most important first, with labels."""
    room, columns = width - len("step 100000  00:00:00 left"), {}
    for name, label in _WATCHED.items():
        for kind in ("", "eval_", "train_"):
            needed = len(kind) + len(label) + _WIDTH + 3
            if isinstance(logs.get(f"{kind}{name}"), int | float) and needed <= room:
                columns[f"{kind}{name}"] = f"{kind}{label}"
                room -= needed
    return columns


def log_line(logs: Mapping[str, Any], step: int, columns: Mapping[str, str]) -> str:
    """One line for `logs`: the step, and the numbers of `columns`; "-" where there is none."""
    numbers = (f"  {label} {_number(logs.get(key)):<{_WIDTH}}" for key, label in columns.items())
    return f"step {step:<6}" + "".join(numbers).rstrip()


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "-"
    return f"{value:,.0f}" if math.isfinite(value) and abs(value) >= 1000 else f"{value:.4g}"
