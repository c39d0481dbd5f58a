"""`LigerDistillationTrainer`: TRL's `DistillationTrainer` with the kernels in both models and both heads in one."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import trl.trainer.distillation_trainer as trl_distillation_trainer
from torch import nn
from trl import DistillationTrainer

from liger_trainer.compat.private import require
from liger_trainer.compat.rebound import rebound
from liger_trainer.compat.trl import DISTILLATION
from liger_trainer.configs.trl_configs import LigerDistillationConfig
from liger_trainer.head.divergence import divergence
from liger_trainer.head.forward import step_of_forward
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.head.step import Forward, running
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX
from liger_trainer.trainers.base import WHOLE_GRADIENTS, parameters_of
from liger_trainer.trainers.teacher import TeacherMixin

create_model_from_path, _trl_init, _trl_compute_loss, *_ = require(DISTILLATION)


class _LogitsForHiddenStates(nn.Module):
    """Wraps a model so that its backbone, which TRL asks for hidden states, returns deferred logits instead."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = functools.partial(self._run, model)

    @staticmethod
    def _run(model: nn.Module, **inputs: Any) -> SimpleNamespace:
        native = type(model).forward
        with running(step_of_forward(model, native, (), inputs, Forward(has_labels=True))):
            return SimpleNamespace(last_hidden_state=native(model, **inputs).logits)


def _divergence_loss(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_weight: torch.Tensor,
    completion_mask: torch.Tensor,
    beta: float,
    num_items_in_batch: torch.Tensor | int | None = None,
    temperature: float = 1.0,
    **biases_scales_and_softcaps: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """TRL's `_chunked_divergence_loss`, but of logits; deferred ones have their own head, scale and soft-cap."""
    mask = completion_mask != 0
    labels = torch.zeros_like(completion_mask).masked_fill(~mask, IGNORE_INDEX)
    found = divergence(student_logits, teacher_logits, labels, beta, temperature, num_items_in_batch, IGNORE_INDEX)
    assert found.entropy is not None
    return found.loss, found.entropy.sum(), mask.sum()


class _Distillation(DistillationTrainer):
    """TRL's trainer, except that a teacher given by name gets the kernels when it is loaded, and the loss is ours."""

    @functools.wraps(DistillationTrainer.__init__)  # type: ignore[misc]  # LigerTRLMixin reads the signature
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init = rebound(_trl_init, {"create_model_from_path": self._create_model})
        init(self, *args, **kwargs)

    _compute_loss_of_logits = rebound(_trl_compute_loss, {"_chunked_divergence_loss": _divergence_loss})


class LigerDistillationTrainer(TeacherMixin, _Distillation):
    """[`~trl.DistillationTrainer`], on-policy distillation, with the kernels in student and teacher.

    Takes the same arguments; `args` is a [`LigerDistillationConfig`], or a `DistillationConfig`, with which the kernels
    are on. TRL's code generates, masks, normalises and logs; the divergence and the entropy come from one operator over
    both heads, which holds the logits of one chunk of tokens at a time. Soft-caps and scales are those that the models'
    own forwards apply, whatever they are called in a configuration. An adapter on the student's LM head, which TRL
    refuses, is trained, one chunk of tokens at a time.

    Raises:
        ValueError: without a teacher or for one of another vocabulary, for several GPUs in one process
            (`nn.DataParallel`), for a wrong kernel configuration, and with `strict_kernels` for a kernel that cannot be
            applied to the student; for a student that tensor parallelism splits; for `torch_compile` under DDP.
    """

    trl_module = trl_distillation_trainer
    config_class = LigerDistillationConfig
    _generates = True

    @parameters_of(DistillationTrainer.__init__, LigerDistillationConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = self.get_tp_size()
        if size > 1:
            raise ValueError(
                f"`model` is split by tensor parallelism (`tp_size` is {size}), and TRL's on-policy distillation lets "
                "every process generate completions of its own, which the processes of such a group must share. Load "
                "it without `tp_size` and spread it with FSDP2, or distil with LigerGKDTrainer and `lmbda=0`."
            )
        processes, kind = self.accelerator.num_processes, self.accelerator.distributed_type
        if self.args.torch_compile and processes > 1 and kind in WHOLE_GRADIENTS:
            raise ValueError(
                "`torch_compile` is true under DDP, where TRL's on-policy distillation calls a compiled model past "
                "DDP: gradients are not averaged, and each process trains a model of its own. Set it to false, or "
                "spread the model with FSDP2."
            )

    def _create_model(self, model_id: str, *args: Any, **kwargs: Any) -> nn.Module:
        model = create_model_from_path(model_id, *args, **kwargs)
        return self._with_kernels(model) if model_id == self._teacher_name else model  # the student's come later

    def _get_last_hidden_state(self, unwrapped_model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self._compares_heads():
            return super()._get_last_hidden_state(unwrapped_model, *args, **kwargs)
        model = without_adapters(self.accelerator.unwrap_model(unwrapped_model, keep_torch_compile=False))
        return super()._get_last_hidden_state(_LogitsForHiddenStates(model), *args, **kwargs)

    def _compute_loss(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not self._compares_heads():
            return super()._compute_loss(*args, **kwargs)
        return self._compute_loss_of_logits(*args, **kwargs)
