"""TRL's `RLOOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import RLOOConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerRLOOConfig(KernelFlags, RLOOConfig):
    """[`~trl.RLOOConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
