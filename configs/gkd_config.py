"""TRL's `GKDConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.gkd import GKDConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerGKDConfig(KernelFlags, GKDConfig):
    """[`~trl.experimental.gkd.GKDConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
