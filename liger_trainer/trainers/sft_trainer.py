"""`LigerSFTTrainer`: TRL's `SFTTrainer` with the kernels and the fused head."""

from __future__ import annotations

import contextlib
from typing import Any

import trl.trainer.sft_trainer as trl_sft_trainer
from torch import nn
from transformers import TrainingArguments
from trl import SFTConfig, SFTTrainer

from liger_trainer.configs.flags import kernel_config_of
from liger_trainer.configs.sft_config import LigerSFTConfig
from liger_trainer.trainers.fused_head import install_fused_forward, own_fused_head
from liger_trainer.trainers.mixin import LigerTrainerMixin, wants_kernels


class LigerSFTTrainer(LigerTrainerMixin, SFTTrainer):
    """[`~trl.SFTTrainer`] with the kernels in the model and our fused LM head.

    Takes the same arguments; `args` is a [`LigerSFTConfig`], or an `SFTConfig`, with which the kernels are on. Loss,
    options and metrics are TRL's own code on statistics that are computed without logits. An adapter on the LM head,
    which TRL refuses, is trained, with its logits built. Each log also holds `tokens_per_second`, `mfu` where the
    hardware's peak is known, and `peak_memory_gib`.

    Raises:
        ValueError: for several GPUs in one process (`nn.DataParallel`), for a wrong kernel configuration, and with
            `strict_kernels` for a kernel that cannot be applied.
    """

    def __init__(self, model: Any, args: TrainingArguments | None = None, *more: Any, **kwargs: Any) -> None:
        args = _sft_config(args, model)
        wants = wants_kernels(args)
        fused = wants and kernel_config_of(args).linear_cross_entropy
        # TRL warns about `use_liger_kernel`, which to it means the liger-kernel package, and switches its head off.
        args.use_liger_kernel = False
        try:
            head = own_fused_head(trl_sft_trainer, self._add_fused_lm_head) if fused else contextlib.nullcontext()
            with head:
                super().__init__(model, args, *more, **kwargs)
        finally:
            args.use_liger_kernel = wants
        self._finish_init()

    def _add_fused_lm_head(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Called by TRL's `__init__` when `self.model` is complete, adapters included."""
        assert isinstance(self.model, nn.Module)
        assert isinstance(self.args, SFTConfig)
        self._apply_kernels(self.model)
        install_fused_forward(model, uniform_gradient=self.args.loss_type != "dft")


def _sft_config(args: TrainingArguments | None, model: Any) -> SFTConfig:
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path or type(model).__name__
        return LigerSFTConfig(f"{name.rstrip('/').split('/')[-1]}-SFT")
    if isinstance(args, SFTConfig):
        return args
    values = args.to_dict()
    values["hub_token"] = args.hub_token  # to_dict hides it
    values["use_liger_kernel"] = wants_kernels(args)
    return LigerSFTConfig(**values)
