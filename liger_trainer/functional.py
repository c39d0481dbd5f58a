"""The operators as plain functions, the way `torch.nn.functional` offers its own."""

from liger_trainer.kernels.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_trainer.kernels.fused_add_rms_norm import fused_add_rms_norm
from liger_trainer.kernels.geglu import geglu, geglu_fused
from liger_trainer.kernels.layer_norm import layer_norm
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.qk_norm_rope import qk_norm_rope
from liger_trainer.kernels.rms_norm import rms_norm
from liger_trainer.kernels.rope import rope
from liger_trainer.kernels.rope_layouts import rope_complex, rope_multimodal, rope_vision
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused

__all__ = [
    "CrossEntropyOutput",
    "cross_entropy",
    "fused_add_rms_norm",
    "geglu",
    "geglu_fused",
    "layer_norm",
    "linear_cross_entropy",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "rope_complex",
    "rope_multimodal",
    "rope_vision",
    "swiglu",
    "swiglu_fused",
]
