"""`LigerRLOOTrainer`: TRL's `RLOOTrainer` with the kernels and the fused head."""

from __future__ import annotations

from typing import Any

import trl.trainer.rloo_trainer as trl_rloo_trainer
from trl import RLOOTrainer

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import RLOO_GENERATION, RLOO_HEAD
from liger_trainer.configs.trl_configs import LigerRLOOConfig
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.generation_mixin import GenerationMixin

require(RLOO_HEAD)
require(RLOO_GENERATION)


class LigerRLOOTrainer(GenerationMixin, RLOOTrainer):
    """[`~trl.RLOOTrainer`], REINFORCE leave-one-out, with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerRLOOConfig`], or a `RLOOConfig`, with which the kernels are on. Loss
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

    trl_module = trl_rloo_trainer
    config_class = LigerRLOOConfig

    @parameters_of(RLOOTrainer.__init__, LigerRLOOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
