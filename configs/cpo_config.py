"""TRL's `CPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.cpo import CPOConfig

from liger_trainer.configs.flags import KernelFlags


@dataclass
class LigerCPOConfig(KernelFlags, CPOConfig):
    """[`~trl.experimental.cpo.CPOConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
