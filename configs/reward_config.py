"""TRL's `RewardConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import RewardConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerRewardConfig(KernelFlags, RewardConfig):
    """[`~trl.RewardConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
