"""The operators as modules and losses, with the call signatures of Liger's.

Arguments that only steer how Liger's kernels work inside are accepted and have no effect, as each class says.
"""

from liger_trainer.nn.losses import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_trainer.nn.mlp import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_trainer.nn.norms import LigerLayerNorm, LigerRMSNorm
from liger_trainer.nn.rope import liger_rotary_pos_emb
from liger_trainer.nn.softmax import LigerMultiTokenAttention, LigerSoftmax, LigerSparsemax

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerLayerNorm",
    "LigerMultiTokenAttention",
    "LigerRMSNorm",
    "LigerSoftmax",
    "LigerSparsemax",
    "LigerSwiGLUMLP",
    "liger_rotary_pos_emb",
]
