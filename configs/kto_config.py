"""TRL's `KTOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import KTOConfig

from liger_trainer.configs.packing_flags import PackingFlags


@dataclass
class LigerKTOConfig(PackingFlags, KTOConfig):
    """[`~trl.KTOConfig`] with the flags of [`PackingFlags`]; the kernels are on by default."""
