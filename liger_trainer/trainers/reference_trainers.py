"""`LigerDPOTrainer` and `LigerKTOTrainer`: TRL's trainers with a reference, with the kernels and the fused head."""

from __future__ import annotations

from typing import Any

import trl.trainer.dpo_trainer as trl_dpo_trainer
import trl.trainer.kto_trainer as trl_kto_trainer
from trl import DPOTrainer, KTOTrainer

from liger_trainer.compat.private import available, require
from liger_trainer.compat.trl import DPO_HEAD, DPO_METRICS, KTO_HEAD, KTO_METRICS
from liger_trainer.configs.trl_configs import LigerDPOConfig, LigerKTOConfig
from liger_trainer.trainers.base import parameters_of
from liger_trainer.trainers.deferred_metrics import GATHERING, DeferredMetrics, may_defer
from liger_trainer.trainers.reference import ReferenceFirst, ReferenceMixin


class LigerDPOTrainer(ReferenceMixin, ReferenceFirst, DPOTrainer):
    """[`~trl.DPOTrainer`], preference optimisation on pairs, with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerDPOConfig`], or a `DPOConfig`, with which the kernels are on. Loss
    types, options and metrics are TRL's own code on log-probabilities that are computed without logits. The reference
    model, where there is one, gets the same kernels, so that the two differ by their weights alone. An adapter on the
    LM head, which TRL refuses, is trained.

    Raises:
        TypeError: for `args` of another trainer.
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    trl_module = trl_dpo_trainer
    config_class = LigerDPOConfig
    reference_columns = ("ref_chosen_logps", "ref_rejected_logps")
    _forward_takes_parts = True

    @parameters_of(DPOTrainer.__init__, LigerDPOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require(DPO_HEAD)
        super().__init__(*args, **kwargs)
        if may_defer(self) and available(DPO_METRICS):
            self._deferred = DeferredMetrics(self, GATHERING)


class LigerKTOTrainer(ReferenceMixin, ReferenceFirst, KTOTrainer):
    """[`~trl.KTOTrainer`], preference optimisation without pairs, with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerKTOConfig`], or a `KTOConfig`, with which the kernels are on. Loss,
    reference, adapters and errors are as in [`LigerDPOTrainer`].
    """

    trl_module = trl_kto_trainer
    config_class = LigerKTOConfig
    reference_columns = ("ref_logps", "ref_KL_logps")
    _reference_reads = frozenset(
        f"{of}{name}" for of in ("", "KL_") for name in ("input_ids", "attention_mask", "completion_mask")
    ) | {"label"}
    _forward_takes_parts = True

    @parameters_of(KTOTrainer.__init__, LigerKTOConfig)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        require(KTO_HEAD)
        super().__init__(*args, **kwargs)
        if may_defer(self) and available(KTO_METRICS):
            self._deferred = DeferredMetrics(self, GATHERING, leaves_out=True)
