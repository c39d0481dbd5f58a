"""The operators as plain functions, the way `torch.nn.functional` offers its own."""

from liger_trainer.kernels.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_trainer.kernels.divergence_options import DivergenceOutput
from liger_trainer.kernels.elementwise_divergence import jsd, kl_div, tvd
from liger_trainer.kernels.fused_add_rms_norm import fused_add_rms_norm
from liger_trainer.kernels.fused_ce_tvd import fused_ce_tvd
from liger_trainer.kernels.geglu import geglu, geglu_fused
from liger_trainer.kernels.layer_norm import layer_norm
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.linear_jsd import linear_cosine_distance, linear_jsd, linear_kl
from liger_trainer.kernels.linear_kl_div import linear_kl_div
from liger_trainer.kernels.rms_norm import rms_norm
from liger_trainer.kernels.rope import rope
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused

__all__ = [
    "CrossEntropyOutput",
    "DivergenceOutput",
    "cross_entropy",
    "fused_add_rms_norm",
    "fused_ce_tvd",
    "geglu",
    "geglu_fused",
    "jsd",
    "kl_div",
    "layer_norm",
    "linear_cosine_distance",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_kl",
    "linear_kl_div",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_fused",
    "tvd",
]
