"""TRL's `DPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import DPOConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerDPOConfig(KernelFlags, DPOConfig):
    """[`~trl.DPOConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
