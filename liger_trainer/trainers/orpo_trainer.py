"""`LigerORPOTrainer`: TRL's `ORPOTrainer` with the kernels and the fused head."""

from __future__ import annotations

from typing import Any

from torch import nn
from trl.experimental.orpo import ORPOTrainer

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import ORPO_PAIRS
from liger_trainer.configs.trl_experimental_configs import LigerORPOConfig
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.pair_mixin import PairMixin, forward_pairs

require(ORPO_PAIRS)


class LigerORPOTrainer(PairMixin, ORPOTrainer):
    """[`~trl.experimental.orpo.ORPOTrainer`] with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerORPOConfig`], or an `ORPOConfig`, with which the kernels are on. Loss
    and metrics are TRL's own code on log-probabilities; the logits, which TRL builds, are not. An encoder-decoder model
    trains as in TRL, with the kernels that fit its layers.

    Raises:
        ValueError: for a completion without tokens, whose average log-probability does not exist, for several GPUs in
            one process (`nn.DataParallel`), for a wrong kernel configuration, and with `strict_kernels` for a kernel
            that cannot be applied.
    """

    config_class = LigerORPOConfig
    padding_value: int  # TRL's

    @parameters_of(ORPOTrainer.__init__, LigerORPOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple:
        """One forward on all pairs; returns what TRL's method does, with the mean logits in place of the logits."""
        if not self._fused:
            return super().concatenated_forward(model, batch)
        pairs = forward_pairs(self, model, batch, self.padding_value)
        # The loss of the chosen sequences includes the prompt (Hong et al. 2024, arXiv:2403.07691).
        nll = pairs.chosen_nll(pairs.is_token)
        return pairs.results(pairs.completion_log_probs(average=True), pairs.mean_logits.shape[1] - 1, nll)
