"""The progress bar of a recipe's run, with one terminal line for each log."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from typing import Any

from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

# The most important first. Keys of an evaluation begin with `eval_`, those of the whole run with `train_`.
_WATCHED = (
    *("loss", "reward", "rewards/accuracies", "accuracy", "rewards/margins", "mean_token_accuracy"),
    *("grad_norm", "learning_rate", "tokens_per_second", "peak_memory_gib", "entropy", "epoch", "runtime"),
)


class LogLinesCallback(ProgressCallback):
    """Shows as many numbers of each log as fit into a line; the Trainer's own callback shows a dictionary of all.

    All numbers are in ``trainer_state.json`` and reach every reporter.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the line above the bar."""
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(log_line(logs or {}, state.global_step, shutil.get_terminal_size().columns))


def log_line(logs: Mapping[str, Any], step: int, width: int) -> str:
    """One line for `logs`: the step, and the most important numbers that fit into `width` characters."""
    line = f"step {step}"
    for name in _WATCHED:
        for key in (name, f"eval_{name}", f"train_{name}"):
            if isinstance(logs.get(key), int | float):
                large = math.isfinite(logs[key]) and abs(logs[key]) >= 1000
                more = f"  {key} {logs[key]:{',.0f' if large else '.4g'}}"
                line += more if len(line) + len(more) < width else ""
    return line
