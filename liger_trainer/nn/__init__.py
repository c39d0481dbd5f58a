"""The operators as modules and losses, with the call signatures of Liger's.

Arguments that only steer how Liger's kernels work inside are accepted and have no effect, as each class says.
"""

from liger_trainer.nn.losses import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_trainer.nn.mlp import LigerGEGLUMLP, LigerSwiGLUMLP
from liger_trainer.nn.norms import LigerDyT, LigerGroupNorm, LigerLayerNorm, LigerPolyNorm, LigerRMSNorm
from liger_trainer.nn.rms_norms import (
    LigerFusedAddRMSNorm,
    LigerModulatedRMSNorm,
    LigerRMSNormForGemma,
    LigerRMSNormForGemma2,
    LigerRMSNormForGemma3,
    LigerRMSNormForGemma4,
    LigerRMSNormForGlm4,
    LigerRMSNormForMuseGlimmer,
    LigerRMSNormForMuseGlimmerTextCentered,
    LigerRMSNormForOlmo2,
    LigerRMSNormForQwen3Next,
)
from liger_trainer.nn.rope import liger_rotary_pos_emb

__all__ = [
    "LigerCrossEntropyLoss",
    "LigerDyT",
    "LigerFusedAddRMSNorm",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerGEGLUMLP",
    "LigerGroupNorm",
    "LigerLayerNorm",
    "LigerModulatedRMSNorm",
    "LigerPolyNorm",
    "LigerRMSNorm",
    "LigerRMSNormForGemma",
    "LigerRMSNormForGemma2",
    "LigerRMSNormForGemma3",
    "LigerRMSNormForGemma4",
    "LigerRMSNormForGlm4",
    "LigerRMSNormForMuseGlimmer",
    "LigerRMSNormForMuseGlimmerTextCentered",
    "LigerRMSNormForOlmo2",
    "LigerRMSNormForQwen3Next",
    "LigerSwiGLUMLP",
    "liger_rotary_pos_emb",
]
