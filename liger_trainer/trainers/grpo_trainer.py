"""`LigerGRPOTrainer`: TRL's `GRPOTrainer` with the kernels and the fused head."""

from __future__ import annotations

from typing import Any

import torch
import trl.trainer.grpo_trainer as trl_grpo_trainer
from trl import GRPOTrainer

from liger_trainer.compat.private import available, require
from liger_trainer.compat.trl import GRPO_GENERATION, GRPO_HEAD, POLICY_LOSS
from liger_trainer.configs.loss_types import divided_by
from liger_trainer.configs.trl_configs import LigerGRPOConfig
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.generation_mixin import GenerationMixin

require(GRPO_HEAD)
require(GRPO_GENERATION)


class LigerGRPOTrainer(GenerationMixin, GRPOTrainer):
    """[`~trl.GRPOTrainer`], group-relative policy optimisation, with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerGRPOConfig`], or a `GRPOConfig`, with which the kernels are on. Loss
    types, options and metrics are TRL's own code on log-probabilities that are computed without logits. The reference
    model, where there is one, gets the same kernels. Generation, with vLLM or without, runs the model as ever: its
    forward without the fused head, and its parameters under their names. An adapter on the LM head, which TRL refuses,
    is trained. A reward function that raises, or returns anything but one number or None a completion, is a
    [`RewardError`] that names the function and the sample.

    Raises:
        TypeError: for `args` of another trainer.
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    trl_module = trl_grpo_trainer
    config_class = LigerGRPOConfig

    @parameters_of(GRPOTrainer.__init__, LigerGRPOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """TRL's loss; `policy_loss` is logged as a mean over the step, whatever the loss type."""
        metrics = self._metrics["train"]
        before = len(metrics.get("policy_loss", ()))
        loss = super().compute_loss(*args, **kwargs)
        if divided_by(self.loss_type) == "step" and available(POLICY_LOSS):  # as TRL logs it too
            steps = getattr(self, "current_gradient_accumulation_steps", 1)  # none in an evaluation before training
            for place in range(before, len(metrics.get("policy_loss", ()))):
                metrics["policy_loss"][place] *= steps
        return loss
