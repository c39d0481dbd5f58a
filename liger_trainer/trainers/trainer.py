"""`LigerTrainer`: the `Trainer` of transformers with the kernels."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainingArguments

from liger_trainer.configs.training_arguments import LigerTrainingArguments
from liger_trainer.trainers.converted_checkpoints import split_models_resume
from liger_trainer.trainers.mixin import LigerTrainerMixin, own_arguments


class LigerTrainer(LigerTrainerMixin, Trainer):
    """[`~transformers.Trainer`] with the kernels in the model, for training and evaluation alike.

    Takes the same arguments; `args` is a [`LigerTrainingArguments`], or a `TrainingArguments`, with which the kernels
    are on. The loss, the metrics and the checkpoints are those of the `Trainer`. Each log also holds
    `tokens_per_second`, `mfu` where the hardware's peak is known, and `peak_memory_gib`.

    Raises:
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    def __init__(self, model: Any = None, args: TrainingArguments | None = None, *more: Any, **kwargs: Any) -> None:
        if args is None:
            args = LigerTrainingArguments()
        args = own_arguments(args)
        with split_models_resume(args, model):
            super().__init__(model, args, *more, **kwargs)
        self._finish_init()
