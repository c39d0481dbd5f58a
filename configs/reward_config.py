"""TRL's `RewardConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import RewardConfig

from liger_trainer.configs.packing_flags import SharingFlags


@dataclass
class LigerRewardConfig(SharingFlags, RewardConfig):
    """[`~trl.RewardConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""
