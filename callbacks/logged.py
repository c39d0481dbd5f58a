"""The base of callbacks that add numbers to the Trainer's log."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class LoggedMetricsCallback(TrainerCallback):
    """Adds [`metrics`] to every training log of the Trainer, and [`summary`] to the log at the end of a run.

    `Trainer.log` passes one dictionary to all callbacks in turn, so numbers put into it reach every reporter that comes
    later. The Liger trainers put these callbacks first; with a stock `Trainer`, where callbacks given by the user come
    after the reporters, do the same with ``trainer.callback_handler.callbacks.insert(0, callback)``.

    The numbers may be reduced over all processes. That is safe in the Trainer's own logs, which all processes make;
    they hold a learning rate beside the loss. What a user logs with `Trainer.log`, perhaps on one process, is left
    alone.
    """

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Numbers of the steps since the last training log. Called on every process."""
        return {}

    def summary(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Numbers of the whole run, for the log at its end. Called on every process."""
        return {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the numbers in place, and to the entry that `Trainer.log` has just put into the history."""
        if logs is None:
            return
        if "loss" in logs and "learning_rate" in logs:
            extra = self.metrics(args, state)
        elif "train_runtime" in logs:
            extra = {f"train_{key}": value for key, value in self.summary(args, state).items()}
        else:
            return
        extra = {key: value for key, value in extra.items() if math.isfinite(value)}
        logs.update(extra)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(extra)


def is_distributed() -> bool:
    """Whether other processes train with this one."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def summed_over_processes(own: torch.Tensor) -> torch.Tensor:
    """`own`, which is overwritten by its sum over all processes."""
    if is_distributed():
        torch.distributed.all_reduce(own)
    return own
