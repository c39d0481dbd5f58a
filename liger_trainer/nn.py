"""The operators as modules and losses, with the call signatures of Liger's.

Arguments that only steer how Liger's kernels work inside are accepted and have no effect, as each class says.
"""

from liger_trainer.liger.nn.distillation import (
    LigerFusedCETVDLoss,
    LigerFusedLinearCosineSimilarityLoss,
    LigerFusedLinearJSD,
    LigerFusedLinearJSDLoss,
    LigerFusedLinearKLDivLoss,
    LigerJSD,
    LigerKLDIVLoss,
    LigerTVDLoss,
)
from liger_trainer.liger.nn.embedding import LigerEmbedding
from liger_trainer.liger.nn.experts import LigerExperts
from liger_trainer.liger.nn.losses import LigerCrossEntropyLoss, LigerFusedLinearCrossEntropyLoss
from liger_trainer.liger.nn.mlp import (
    LigerBlockSparseTop2MLP,
    LigerFalconH1MLP,
    LigerFalconH1SwiGLUMLP,
    LigerGEGLUMLP,
    LigerGEGLUMLPForGemma4,
    LigerHunyuanV1SwiGLUMLP,
    LigerMLP,
    LigerPhi3SwiGLUMLP,
    LigerQwen3MoeSwiGLUMLP,
    LigerReLUSquared,
    LigerSwiGLUMLP,
    LigerSwiGLUMLPForMuseGlimmer,
)
from liger_trainer.liger.nn.norms import LigerDyT, LigerGroupNorm, LigerLayerNorm, LigerPolyNorm, LigerRMSNorm
from liger_trainer.liger.nn.policy import triton_grpo_loss
from liger_trainer.liger.nn.rms_norms import (
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
from liger_trainer.liger.nn.rope import (
    liger_llama4_text_rotary_pos_emb,
    liger_llama4_vision_rotary_pos_emb,
    liger_multimodal_rotary_pos_emb,
    liger_rotary_pos_emb,
    liger_rotary_pos_emb_gpt_oss,
    liger_rotary_pos_emb_vision,
)
from liger_trainer.liger.nn.softmax import LigerMultiTokenAttention, LigerSoftmax, LigerSparsemax
from liger_trainer.liger.nn.tiled_mlp import LigerTiledGEGLUMLP, LigerTiledSwiGLUMLP
from liger_trainer.liger.nn.vocab_parallel import LigerVocabParallelCrossEntropy

__all__ = [
    "LigerBlockSparseTop2MLP",
    "LigerCrossEntropyLoss",
    "LigerDyT",
    "LigerEmbedding",
    "LigerExperts",
    "LigerFalconH1MLP",
    "LigerFalconH1SwiGLUMLP",
    "LigerFusedAddRMSNorm",
    "LigerFusedCETVDLoss",
    "LigerFusedLinearCosineSimilarityLoss",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearJSD",
    "LigerFusedLinearJSDLoss",
    "LigerFusedLinearKLDivLoss",
    "LigerGEGLUMLP",
    "LigerGEGLUMLPForGemma4",
    "LigerGroupNorm",
    "LigerHunyuanV1SwiGLUMLP",
    "LigerJSD",
    "LigerKLDIVLoss",
    "LigerLayerNorm",
    "LigerMLP",
    "LigerModulatedRMSNorm",
    "LigerMultiTokenAttention",
    "LigerPhi3SwiGLUMLP",
    "LigerPolyNorm",
    "LigerQwen3MoeSwiGLUMLP",
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
    "LigerReLUSquared",
    "LigerSoftmax",
    "LigerSparsemax",
    "LigerSwiGLUMLP",
    "LigerSwiGLUMLPForMuseGlimmer",
    "LigerTVDLoss",
    "LigerTiledGEGLUMLP",
    "LigerTiledSwiGLUMLP",
    "LigerVocabParallelCrossEntropy",
    "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb",
    "liger_multimodal_rotary_pos_emb",
    "liger_rotary_pos_emb",
    "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_vision",
    "triton_grpo_loss",
]
