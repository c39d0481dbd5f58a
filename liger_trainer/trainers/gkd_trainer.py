"""`LigerGKDTrainer`: TRL's `GKDTrainer` with the kernels in both models and both heads in one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import trl.trainer.sft_trainer as trl_sft_trainer
from torch import nn
from transformers import AutoModelForCausalLM
from trl.import_utils import suppress_experimental_warning

from liger_trainer.compat.private import require
from liger_trainer.compat.rebound import rebound
from liger_trainer.compat.transformers import LABELS_OF_A_STEP
from liger_trainer.compat.trl import GKD, SFT_HEAD
from liger_trainer.configs.trl_experimental_configs import LigerGKDConfig
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.divergence import divergence
from liger_trainer.head.step import Step, current_step, running
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.step import discard_facts, process_scale
from liger_trainer.trainers.teacher import TeacherMixin

with suppress_experimental_warning():
    from trl.experimental.gkd import GKDTrainer

require(SFT_HEAD)
require(LABELS_OF_A_STEP)
ForwardRedirection, _, _trl_init, _trl_training_step, *_ = require(GKD)

_answer = rebound(_trl_training_step, {"super": lambda *_: SimpleNamespace(training_step=lambda *_: None)})
"""TRL's step without the training at its end: it may replace the answers of a batch by those of a model."""


class _GKD(GKDTrainer):
    """TRL's trainer, except that a teacher given by name gets the kernels when it is loaded."""

    @functools.wraps(GKDTrainer.__init__)  # type: ignore[misc]  # LigerTRLMixin reads the signature
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(GKDTrainer.__init__).bind(self, *args, **kwargs).arguments
        if given.get("processing_class") is None and given.get("data_collator") is None:
            raise ValueError(
                "`processing_class` is None; TRL's GKDTrainer does not load it. Give the student's tokenizer, such as "
                "`AutoTokenizer.from_pretrained(...)`."
            )
        loader = SimpleNamespace(from_pretrained=self._load_teacher)
        rebound(_trl_init, {"AutoModelForCausalLM": loader})(self, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super(GKDTrainer, self).training_step(*args, **kwargs)  # the batches of a step are answered together


class LigerGKDTrainer(TeacherMixin, _GKD):
    """[`~trl.experimental.gkd.GKDTrainer`], generalised knowledge distillation, with the kernels in both models.

    Takes the same arguments; `args` is a [`LigerGKDConfig`], or a `GKDConfig`, with which the kernels are on. TRL's
    code generates and masks, for all micro-batches of a step before the first is trained on, and the loss is divided by
    the labels of what was generated; the divergence comes from one operator over both heads, which holds the logits
    of one chunk of tokens at a time, where TRL holds those of both models whole. An adapter on the student's LM head,
    which TRL refuses, is trained, one chunk of tokens at a time.

    Raises:
        ValueError: without a tokenizer or a teacher, for a teacher of another vocabulary, for several GPUs in one
            process (`nn.DataParallel`), for a wrong kernel configuration, and with `strict_kernels` for a kernel that
            cannot be applied to the student.
    """

    trl_module = trl_sft_trainer  # its `__init__` installs the fused head of a GKDTrainer too
    config_class = LigerGKDConfig
    _generates = True

    @parameters_of(GKDTrainer.__init__, LigerGKDConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _load_teacher(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self._with_kernels(AutoModelForCausalLM.from_pretrained(*args, **kwargs))

    def _before_step(self, batches: Sequence[Any], num_items_in_batch: Any) -> Any:
        """Answers the prompts of a step, and then counts its labels; TRL divides by those of the data set's answers."""
        for batch in batches:
            labels = batch["labels"]
            _answer(self, self.model_wrapped, batch)
            if batch["labels"] is not labels:
                discard_facts(batch)
        return self._get_num_items_in_batch(list(batches), self.args.device)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """TRL's loss, divided by the labels of all processes; the mean of their gradients is that of one process."""
        found = self._loss(model, inputs, return_outputs, num_items_in_batch)
        scale = process_scale(self, num_items_in_batch)
        return (scale * found[0], found[1]) if return_outputs else scale * found

    def _loss(self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, num_items_in_batch: Any) -> Any:
        """TRL's loss, computed inside the forward of the wrapped student, where FSDP has gathered a sharded head."""
        student = self.accelerator.unwrap_model(model)
        compute = functools.partial(super().compute_loss, return_outputs=return_outputs)

        def inside(_: torch.Tensor) -> Any:
            with running(replace(current_step(), loss_follows=True)):
                return compute(student.forward, inputs, num_items_in_batch=num_items_in_batch)

        if not self._compares_heads():
            return compute(model, inputs, num_items_in_batch=num_items_in_batch)
        # On GPUs FSDP2 fails on a call without arguments, before torch 2.13.
        return ForwardRedirection()(model, student, inside, inputs["input_ids"])

    def _step_of(self, inputs: Any, num_items: torch.Tensor | int | None) -> Step:
        step = super()._step_of(inputs, num_items)
        if step.expected_gradient is None:
            return step
        return replace(step, expected_gradient=step.expected_gradient * process_scale(self, num_items))

    @staticmethod
    def generalized_jsd_loss(
        student_logits: torch.Tensor,
        teacher_logits: torch.Tensor,
        labels: torch.Tensor | None = None,
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """TRL's loss, computed by one operator over both heads if both models have deferred their logits.

        Args:
            student_logits: `(batch, length, V)`.
            teacher_logits: The same shape; no gradient.
            labels: `(batch, length)`, -100 where a token does not count.
            beta: A number in [0, 1]; 0 is ``KL(teacher || student)``, 1 ``KL(student || teacher)``.
            temperature: Divides the logits of both.
            reduction: As in TRL; all but "batchmean" build the logits.
            num_items_in_batch: Divides the sum, regardless of `reduction`.
        """
        deferred = isinstance(student_logits, DeferredLogits) or isinstance(teacher_logits, DeferredLogits)
        if not deferred or labels is None or (num_items_in_batch is None and reduction != "batchmean"):
            return GKDTrainer.generalized_jsd_loss(
                student_logits, teacher_logits, labels, beta, temperature, reduction, num_items_in_batch
            )
        return divergence(student_logits, teacher_logits, labels, beta, temperature, num_items_in_batch).loss
