"""The configurations of TRL's trainers with the kernel flags; they are on by default."""

from __future__ import annotations

from dataclasses import dataclass

from trl import DistillationConfig, DPOConfig, GRPOConfig, KTOConfig, RewardConfig, RLOOConfig, SFTConfig

from liger_trainer.configs.flags import KernelFlags
from liger_trainer.configs.packing_flags import PackingFlags, SharingFlags


@dataclass
class LigerDistillationConfig(KernelFlags, DistillationConfig):
    """[`~trl.DistillationConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""


@dataclass
class LigerDPOConfig(SharingFlags, DPOConfig):  # type: ignore[misc]  # `padding_free` has a default of None here
    """[`~trl.DPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerGRPOConfig(SharingFlags, GRPOConfig):
    """[`~trl.GRPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerKTOConfig(PackingFlags, KTOConfig):
    """[`~trl.KTOConfig`] with the flags of [`PackingFlags`]; the kernels are on by default."""


@dataclass
class LigerRewardConfig(SharingFlags, RewardConfig):
    """[`~trl.RewardConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerRLOOConfig(SharingFlags, RLOOConfig):
    """[`~trl.RLOOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerSFTConfig(KernelFlags, SFTConfig):
    """[`~trl.SFTConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""
