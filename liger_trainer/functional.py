"""The operators as plain functions, the way `torch.nn.functional` offers its own."""

from liger_trainer.kernels.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_trainer.kernels.fused_add_rms_norm import fused_add_rms_norm
from liger_trainer.kernels.geglu import geglu, geglu_fused
from liger_trainer.kernels.layer_norm import layer_norm
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.multi_token_attention import multi_token_attention
from liger_trainer.kernels.rms_norm import rms_norm
from liger_trainer.kernels.rope import rope
from liger_trainer.kernels.softmax import softmax
from liger_trainer.kernels.sparsemax import sparsemax
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused

__all__ = [
    "CrossEntropyOutput",
    "cross_entropy",
    "fused_add_rms_norm",
    "geglu",
    "geglu_fused",
    "layer_norm",
    "linear_cross_entropy",
    "multi_token_attention",
    "rms_norm",
    "rope",
    "softmax",
    "sparsemax",
    "swiglu",
    "swiglu_fused",
]
