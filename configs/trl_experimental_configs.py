"""The configurations of the trainers in `trl.experimental` with the kernel flags.

They have a file of their own because importing `trl.experimental` takes a second. It warns, too, of an import that is
not the user's.
"""

from __future__ import annotations

from dataclasses import dataclass

from trl.import_utils import suppress_experimental_warning

from liger_trainer.configs.flags import KernelFlags
from liger_trainer.configs.trl_configs import SharingFlags

with suppress_experimental_warning():
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.gkd import GKDConfig
    from trl.experimental.orpo import ORPOConfig


@dataclass
class LigerCPOConfig(SharingFlags, CPOConfig):
    """[`~trl.experimental.cpo.CPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""


@dataclass
class LigerGKDConfig(KernelFlags, GKDConfig):
    """[`~trl.experimental.gkd.GKDConfig`] with the flags of [`KernelFlags`]; the kernels are on by default."""


@dataclass
class LigerORPOConfig(SharingFlags, ORPOConfig):
    """[`~trl.experimental.orpo.ORPOConfig`] with the flags of [`SharingFlags`]; the kernels are on by default."""
