"""`TrainingArguments` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import TrainingArguments

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerTrainingArguments(KernelFlags, TrainingArguments):
    """[`~transformers.TrainingArguments`] with the flags of [`KernelFlags`]; the kernels are on by default.

    For [`LigerTrainer`]; of the flags, the stock `Trainer` reads `use_liger_kernel` and `liger_kernel_config` alone.
    """
