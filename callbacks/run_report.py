"""Writes `report.html` into the folder of a run."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_trainer.patching.report import KernelReport
from liger_trainer.run_report.page import GENERATOR
from liger_trainer.run_report.report import run_report
from liger_trainer.stock_trainer import stock_trainer_report

logger = logging.getLogger("liger_trainer")

REPORT = "report.html"


class RunReportCallback(TrainerCallback):
    """Writes `output_dir/report.html`: curves of all that was logged, kernels, arguments, versions, completions.

    The main process writes it with each checkpoint, and once more when training ends. The Liger trainers also write it
    with `save_model` into `output_dir`, and when training ends with an error after a checkpoint. A run that saves
    nothing gets none, nor does a search of hyperparameters, whose trials share the folder. A resumed run continues the
    curves. Training goes on if the file cannot be written, which is said once. A `report.html` that is not ours stays.

    Attributes:
        kernels: The report of [`apply_liger_kernel`]. The Liger trainers set it; with a stock `Trainer` and
            `use_liger_kernel=True`, the callback finds it when training begins.
        completions: The last ones, as TRL's trainers keep them. `LigerGRPOTrainer` and `LigerRLOOTrainer` set it.
    """

    def __init__(self) -> None:
        self.kernels: KernelReport | None = None
        self.completions: Mapping[str, Any] = {}
        self._has_written = self._has_warned = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Looks for the kernels."""
        self._has_written = False
        if self.kernels is None and kwargs.get("model") is not None:
            self.kernels = stock_trainer_report(kwargs["model"])

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes it beside the checkpoint."""
        self.write(args, state, kwargs.get("model"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes it again, with the numbers of the whole run."""
        self.write_again(args, state, kwargs.get("model"))

    def write(self, args: TrainingArguments, state: TrainerState, model: Any = None, ended: str = "") -> None:
        """Writes it, on the main process."""
        if not state.is_world_process_zero or state.is_hyper_param_search:
            return
        path = Path(str(args.output_dir), REPORT)
        try:
            _replace(path, run_report(args, state, model, self.kernels, self.completions, ended))
            self._has_written = True
        except Exception as error:  # whatever it is, it is no reason to lose the run
            if not self._has_warned:
                logger.warning("%s could not be written: %s. Training goes on. (Said once.)", path, error)
            self._has_warned = True

    def write_again(self, args: TrainingArguments, state: TrainerState, model: Any = None, ended: str = "") -> None:
        """[`write`], if this training has written it before; else the folder may hold nothing, and stays so."""
        if self._has_written:
            self.write(args, state, model, ended)


def _replace(path: Path, text: str) -> None:
    """Writes `text` to `path` so that readers see the old file or the new one, whole."""
    if path.exists() and GENERATOR not in path.read_text(encoding="utf-8", errors="replace")[:1000]:
        raise FileExistsError("there is a file of that name which liger_trainer has not written")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
