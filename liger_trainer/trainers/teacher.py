"""What the trainers with a teacher share: the teacher's kernels, and when one operator compares both heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import TrainingArguments

from liger_trainer.compat.peft import ADAPTERS_ON_HEAD
from liger_trainer.compat.private import require
from liger_trainer.configs.flags import kernel_config_of, kernel_mapping_of
from liger_trainer.head.lm_head import find_lm_heads
from liger_trainer.head.step import Step
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.patching.report import KernelReport
from liger_trainer.trainers.base import wants_kernels
from liger_trainer.trainers.splitting import split_teacher
from liger_trainer.trainers.step import loss_divisor
from liger_trainer.trainers.trl_mixin import LigerTRLMixin


class TeacherMixin(LigerTRLMixin):
    """Comes before a TRL trainer that takes a `teacher_model` as its second argument.

    Attributes:
        teacher_kernel_report (`KernelReport`): Patched modules of the teacher; None with the kernels off.
    """

    teacher_kernel_report: KernelReport | None = None
    teacher_model: Any  # TRL's

    def __init__(
        self, model: Any, teacher_model: Any = None, args: TrainingArguments | None = None, *more: Any, **kwargs: Any
    ) -> None:
        if teacher_model is None:
            raise ValueError(
                "`teacher_model` is None; give the model whose next-token distributions are to be learned, or its name."
            )
        config = self._configured(args, model)
        # The teacher needs them before accelerate or DeepSpeed wraps it, which happens in TRL's `__init__`.
        self._teacher_kernels = kernel_mapping_of(config) if wants_kernels(config) else None
        self._teacher_name = teacher_model if isinstance(teacher_model, str) else None
        if isinstance(teacher_model, nn.Module):
            self._with_kernels(teacher_model)
        super().__init__(model, teacher_model, config, *more, **kwargs)

    def _finish_init(self) -> None:
        super()._finish_init()
        split_teacher(self.teacher_model, self.accelerator)

    def _with_kernels(self, teacher: nn.Module) -> nn.Module:
        if self._teacher_kernels is not None:
            self.teacher_kernel_report = apply_liger_kernel(teacher, self._teacher_kernels)
        return teacher

    def _compares_heads(self) -> bool:
        """Whether the divergence is ours: both models defer their logits, or the student's head has an adapter.

        If a head was not patched, TRL's own code is better than ours on logits that are built.
        """
        if not wants_kernels(self.args) or not kernel_config_of(self.args).linear_cross_entropy:
            return False
        if _has_adapter_on_head(self.model):
            return True
        return all(_defers(self.accelerator.unwrap_model(model)) for model in (self.model, self.teacher_model))

    def _step_of(self, inputs: Any, num_items: torch.Tensor | int | None) -> Step:
        step = super()._step_of(inputs, None)
        if step.expected_gradient is None:
            return step
        # The divergence is already divided by `num_items`; only the Trainer's own division remains.
        return replace(step, expected_gradient=step.expected_gradient * loss_divisor(self, num_items))


def _defers(model: nn.Module) -> bool:
    heads, _ = find_lm_heads(model)
    return bool(heads) and all(is_bound_by_us(head) for head in heads)


def _has_adapter_on_head(model: nn.Module) -> bool:
    if not is_peft_model(model):
        return False
    (BaseTunerLayer,) = require(ADAPTERS_ON_HEAD)
    return isinstance(model.get_output_embeddings(), BaseTunerLayer)  # type: ignore[operator]
