"""`LigerSFTTrainer`: TRL's `SFTTrainer` with the kernels and the fused head."""

from __future__ import annotations

from typing import Any, cast

import trl.trainer.sft_trainer as trl_sft_trainer
from torch import nn
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer.configs.sft_config import LigerSFTConfig
from liger_trainer.trainers.base import wants_kernels
from liger_trainer.trainers.one_pass import OnePassModel
from liger_trainer.trainers.trl_mixin import LigerTRLMixin


class LigerSFTTrainer(LigerTRLMixin, SFTTrainer):
    """[`~trl.SFTTrainer`] with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerSFTConfig`], or an `SFTConfig`, with which the kernels are on. Loss,
    options and metrics are TRL's own code on statistics that are computed without logits. An adapter on the LM head,
    which TRL refuses, is trained. Each log also holds `tokens_per_second`, `mfu` where the hardware's peak is known,
    and `peak_memory_gib`.

    With `loss_type="nll"` the gradients at the head are computed in the forward. A subclass may take any loss of the
    log-probabilities and entropies, as with TRL's trainer. Where it calls the model itself, the head takes one matmul
    more than for the loss of this class; where it adds such a term to that loss, three more.

    Raises:
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    trl_module = trl_sft_trainer
    config_class = LigerSFTConfig
    _takes_parts_of_sequences = True

    @classmethod
    def _configured(cls, args: TrainingArguments | None, model: Any) -> Any:
        if args is None or isinstance(args, SFTConfig):
            return super()._configured(args, model)
        values = args.to_dict()  # as TRL takes `TrainingArguments` over
        values["hub_token"] = args.hub_token  # to_dict hides it
        values["use_liger_kernel"] = wants_kernels(args)
        return cls.config_class(**values)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """TRL's loss; with label smoothing or a `compute_loss_func` by one forward instead of two."""
        assert isinstance(self.args, SFTConfig)
        smooths = self.label_smoother is not None and self.args.loss_type == "nll"
        if self._statistics is not None and (smooths or self.compute_loss_func is not None):
            assert isinstance(self.model, nn.Module)
            text_config = self.model.config.get_text_config()  # type: ignore[operator, union-attr]
            model = cast(nn.Module, OnePassModel(model, text_config, self._statistics))
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _weighs_labels_alike(self) -> bool:
        assert isinstance(self.args, SFTConfig)
        return self.args.loss_type != "dft"
