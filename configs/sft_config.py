"""TRL's `SFTConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import SFTConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerSFTConfig(KernelFlags, SFTConfig):
    """[`~trl.SFTConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
