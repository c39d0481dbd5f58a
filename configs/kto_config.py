"""TRL's `KTOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import KTOConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerKTOConfig(KernelFlags, KTOConfig):
    """[`~trl.KTOConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
