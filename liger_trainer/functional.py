"""The operators as plain functions, the way `torch.nn.functional` offers its own."""

from liger_trainer.kernels.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_trainer.kernels.dyt import dyt
from liger_trainer.kernels.fused_add_layer_norm import fused_add_layer_norm
from liger_trainer.kernels.fused_add_rms_norm import fused_add_rms_norm
from liger_trainer.kernels.geglu import geglu, geglu_fused
from liger_trainer.kernels.group_norm import group_norm
from liger_trainer.kernels.layer_norm import layer_norm
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.modulated_rms_norm import modulated_rms_norm
from liger_trainer.kernels.poly_norm import poly_norm
from liger_trainer.kernels.rms_norm import rms_norm
from liger_trainer.kernels.rope import rope
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused

__all__ = [
    "CrossEntropyOutput",
    "cross_entropy",
    "dyt",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "geglu",
    "geglu_fused",
    "group_norm",
    "layer_norm",
    "linear_cross_entropy",
    "modulated_rms_norm",
    "poly_norm",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_fused",
]
