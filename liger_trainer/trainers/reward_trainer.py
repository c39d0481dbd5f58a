"""`LigerRewardTrainer`: TRL's `RewardTrainer` with the kernels."""

from __future__ import annotations

from typing import Any

from torch import nn
from trl import RewardTrainer

from liger_trainer.compat.private import available
from liger_trainer.compat.trl import REWARD_METRICS
from liger_trainer.configs.trl_configs import LigerRewardConfig
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.choose_packing import install_packed_scores, may_be_packed
from liger_trainer.trainers.deferred_metrics import GATHERING, DeferredMetrics, DeferredMetricsMixin, may_defer
from liger_trainer.trainers.trl_mixin import LigerTRLMixin


class LigerRewardTrainer(DeferredMetricsMixin, LigerTRLMixin, RewardTrainer):
    """[`~trl.RewardTrainer`] with the kernels in the model's layers; its head gives one number and stays as it is.

    Takes the same arguments; `args` is a [`LigerRewardConfig`], or a `RewardConfig`, with which the kernels are on.

    Raises:
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    config_class = LigerRewardConfig

    @parameters_of(RewardTrainer.__init__, LigerRewardConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if may_defer(self) and available(REWARD_METRICS):
            self._deferred = DeferredMetrics(self, GATHERING)

    def _apply_kernels(self, model: nn.Module) -> None:
        super()._apply_kernels(model)
        if self._packing is None:
            self._choose_packing()
            base = without_adapters(model)
            if may_be_packed(base):
                install_packed_scores(base, self._packing)
