"""`LigerCPOTrainer`: TRL's `CPOTrainer` with the kernels and the fused head."""

from __future__ import annotations

from typing import Any

from torch import nn
from trl.experimental.cpo import CPOTrainer

from liger_trainer.compat.private import require
from liger_trainer.compat.trl import CPO_PAIRS
from liger_trainer.configs.trl_experimental_configs import LigerCPOConfig
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.pair_mixin import PairMixin, forward_pairs

require(CPO_PAIRS)


class LigerCPOTrainer(PairMixin, CPOTrainer):
    """[`~trl.experimental.cpo.CPOTrainer`] (CPO, SimPO, AlphaPO) with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerCPOConfig`], or a `CPOConfig`, with which the kernels are on. Loss
    types, options and metrics are TRL's own code on log-probabilities; the logits, which TRL builds, are not. An
    encoder-decoder model trains as in TRL, with the kernels that fit its layers.

    Raises:
        ValueError: for a completion without tokens where the loss type averages over them ("ipo", "simpo", "alphapo"),
            for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    config_class = LigerCPOConfig
    pad_token_id: int  # TRL's

    @parameters_of(CPOTrainer.__init__, LigerCPOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)

    def _averages(self) -> bool:
        return self.loss_type in ("ipo", "simpo")

    def concatenated_forward(self, model: nn.Module, batch: dict[str, Any]) -> tuple:
        """One forward on all pairs; returns what TRL's method does, with the mean logits in place of the logits."""
        if not self._fused:
            return super().concatenated_forward(model, batch)
        pairs = forward_pairs(self, model, batch, self.pad_token_id)
        nll = pairs.log_probs.new_zeros(()) if self.cpo_alpha == 0 else pairs.chosen_nll(pairs.is_completion)
        return pairs.results(pairs.completion_log_probs(self._averages()), pairs.mean_logits.shape[1], nll)
