"""TRL's `DPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl import DPOConfig

from liger_trainer.configs.packing_flags import SharingFlags


@dataclass
class LigerDPOConfig(SharingFlags, DPOConfig):  # type: ignore[misc]  # `padding_free` has a default of None here
    """[`~trl.DPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""
