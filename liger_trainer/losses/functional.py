"""The losses of `liger_trainer.losses` as functions, with the names and signatures of Liger's."""

from liger_trainer.liger.losses.functional import *  # noqa: F403
from liger_trainer.liger.losses.functional import __all__ as __all__
