"""Prints the kernel report once."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_trainer.patching.report import KernelReport
from liger_trainer.stock_trainer import stock_trainer_report


class KernelReportCallback(TrainerCallback):
    """Prints what was patched and what was left alone, once, on the main process.

    Args:
        report: The report of [`apply_liger_kernel`]. The Liger trainers set it when they have patched the model. With a
            stock `Trainer` and `use_liger_kernel=True`, the callback finds it when training begins.
    """

    def __init__(self, report: KernelReport | None = None) -> None:
        self.report = report
        self._printed: KernelReport | None = None

    def show(self, main_process: bool = True) -> None:
        """Prints the report, unless it has been printed."""
        if main_process and self.report is not None and self.report is not self._printed:
            print(self.report, flush=True)
            self._printed = self.report

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Prints it before the first step."""
        if self.report is None and kwargs.get("model") is not None:
            self.report = stock_trainer_report(kwargs["model"])
        self.show(state.is_world_process_zero)
