"""TRL's `ORPOConfig` with the kernel flags."""

from __future__ import annotations

from dataclasses import dataclass

from trl.experimental.orpo import ORPOConfig

from liger_trainer.configs.flags import KernelFlags, with_dict_fields


@dataclass
class LigerORPOConfig(KernelFlags, ORPOConfig):
    """[`~trl.experimental.orpo.ORPOConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""

    _VALID_DICT_FIELDS = with_dict_fields(ORPOConfig)
