"""TRL's `ORPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.orpo import ORPOConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerORPOConfig(KernelFlags, ORPOConfig):
    """[`~trl.experimental.orpo.ORPOConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
