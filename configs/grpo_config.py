"""TRL's `GRPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import GRPOConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerGRPOConfig(KernelFlags, GRPOConfig):
    """[`~trl.GRPOConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
