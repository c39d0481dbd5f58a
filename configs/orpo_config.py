"""TRL's `ORPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.orpo import ORPOConfig

from liger_trainer.configs.packing_flags import SharingFlags


@dataclass
class LigerORPOConfig(SharingFlags, ORPOConfig):
    """[`~trl.experimental.orpo.ORPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""
