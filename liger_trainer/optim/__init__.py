"""Optimizers."""

from liger_trainer.optim.adamw import LigerAdamW
from liger_trainer.optim.states import adamw_state_dict

__all__ = ["LigerAdamW", "adamw_state_dict"]
