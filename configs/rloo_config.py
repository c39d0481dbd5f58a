"""TRL's `RLOOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import RLOOConfig

from liger_trainer.configs.packing_flags import SharingFlags


@dataclass
class LigerRLOOConfig(SharingFlags, RLOOConfig):
    """[`~trl.RLOOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""
