"""The operators as modules and losses, with the call signatures of Liger's.

Arguments that only steer how Liger's kernels work inside are accepted and have no effect, as each class says.
"""

from liger_trainer.nn.distillation import (
    LigerFusedCETVDLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)
from liger_trainer.nn.losses import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_trainer.nn.mlp import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_trainer.nn.norms import LigerLayerNorm, LigerRMSNorm
from liger_trainer.nn.rope import liger_rotary_pos_emb

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedCETVDLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKLDivLoss",
    "LigerGEGLUMLP",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "LigerTVDLoss",
    "liger_rotary_pos_emb",
]
