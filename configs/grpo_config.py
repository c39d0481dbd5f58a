"""TRL's `GRPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import GRPOConfig

from liger_trainer.configs.packing_flags import SharingFlags


@dataclass
class LigerGRPOConfig(SharingFlags, GRPOConfig):
    """[`~trl.GRPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""
