"""`LigerTrainer`: the `Trainer` of transformers with the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.trainers.base import LigerTrainerMixin, own_arguments, parameters_of
from liger_trainer.trainers.checkpoints.converted import split_models_resume
from liger_trainer.trainers.moe import aux_loss_coefficients, averaged_aux_loss


class LigerTrainer(LigerTrainerMixin, Trainer):
    """[`~transformers.Trainer`] with the kernels in the model, for training and evaluation alike.

    Takes the same arguments; `args` is a [`LigerTrainingArguments`], or a `TrainingArguments`, with which the kernels
    are on. The loss, the metrics and the checkpoints are those of the `Trainer`, except that the auxiliary loss of a
    mixture of experts is a mean over micro-batches and processes. Each log also has `tokens_per_second`,
    `labelled_share`, `mfu` if the hardware's peak is known, and `peak_memory_gib`; an evaluation of a language model
    also has `eval_perplexity` and `eval_mean_token_accuracy`, over all tokens.

    Raises:
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    _token_metrics = ("perplexity", "mean_token_accuracy")
    _metrics_of_deferred_logits = True
    _coefficients_of: nn.Module | None = None
    _coefficients: list[tuple[Any, str]]

    @parameters_of(Trainer.__init__, LigerTrainingArguments)
    def __init__(self, model: Any = None, args: TrainingArguments | None = None, *more: Any, **kwargs: Any) -> None:
        if args is None:
            args = LigerTrainingArguments()
        args = own_arguments(args)
        with split_models_resume(args, model):
            super().__init__(model, args, *more, **kwargs)
        self._finish_init()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The model's own loss, in which the auxiliary loss of a mixture of experts is a mean over micro-batches."""
        if self.compute_loss_func is not None:  # the loss is the user's
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self._coefficients_of is not self.model:  # `model_init` builds a new model for every trial
            self._coefficients_of, self._coefficients = self.model, aux_loss_coefficients(self.model)
        with averaged_aux_loss(self, self._coefficients, num_items_in_batch):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
