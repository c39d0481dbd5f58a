"""The operators as plain functions, the way `torch.nn.functional` offers its own."""

from liger_trainer.kernels.clamped_swiglu import clamped_swiglu
from liger_trainer.kernels.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_trainer.kernels.embedding import embedding, embedding_backward_, tied_embedding
from liger_trainer.kernels.fused_add_rms_norm import fused_add_rms_norm
from liger_trainer.kernels.gated_down import geglu_down, swiglu_down
from liger_trainer.kernels.geglu import geglu, geglu_fused
from liger_trainer.kernels.layer_norm import layer_norm
from liger_trainer.kernels.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.relu_squared import relu_squared
from liger_trainer.kernels.rms_norm import rms_norm
from liger_trainer.kernels.rope import rope
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused
from liger_trainer.kernels.tiled_mlp import tiled_mlp

__all__ = [
    "CrossEntropyOutput",
    "clamped_swiglu",
    "cross_entropy",
    "embedding",
    "embedding_backward_",
    "fused_add_rms_norm",
    "geglu",
    "geglu_down",
    "geglu_fused",
    "layer_norm",
    "linear_cross_entropy",
    "relu_squared",
    "rms_norm",
    "rope",
    "swiglu",
    "swiglu_down",
    "swiglu_fused",
    "tied_embedding",
    "tiled_mlp",
]
