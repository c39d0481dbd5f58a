"""Optimizers: `adamw` has `LigerAdamW`, `states` what it stores, and `kernels/optim` the step.

Weights in fp32 go through torch's own fused AdamW. torch casts every state that it loads to the dtype of its parameter,
so `load_state_dict` is ours. Under FSDP2, accelerate makes trained weights fp32 if mixed precision is on, and there is
nothing left to do for bf16 weights: the recipes set `bf16: false`.
"""

from liger_trainer.optim.adamw import LigerAdamW
from liger_trainer.optim.states import adamw_state_dict

__all__ = ["LigerAdamW", "adamw_state_dict"]
