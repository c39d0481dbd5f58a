"""TRL's `CPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.cpo import CPOConfig

from liger_trainer.configs.packing_flags import SharingFlags


@dataclass
class LigerCPOConfig(SharingFlags, CPOConfig):
    """[`~trl.experimental.cpo.CPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""
