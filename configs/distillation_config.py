"""TRL's `DistillationConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import DistillationConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerDistillationConfig(KernelFlags, DistillationConfig):
    """[`~trl.DistillationConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
