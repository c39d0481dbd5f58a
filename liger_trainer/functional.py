"""The operators as plain functions, the way `torch.nn.functional` offers its own."""

from liger_trainer.kernels.attention.latent import expand_keys
from liger_trainer.kernels.conv.delta_gates import delta_gates
from liger_trainer.kernels.conv.delta_inputs import delta_inputs
from liger_trainer.kernels.conv.gated_short_conv import gated_short_conv
from liger_trainer.kernels.conv.short_conv import short_conv
from liger_trainer.kernels.documents import Documents, documents_of
from liger_trainer.kernels.head.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_trainer.kernels.head.elementwise_divergence import jsd, kl_div, tvd
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.linear_jsd import DivergenceOutput, linear_cosine_distance, linear_jsd, linear_kl
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs
from liger_trainer.kernels.head.log_probs import log_probs
from liger_trainer.kernels.head.token_statistics import LogProbsOutput
from liger_trainer.kernels.lora.lora import LoRA, LoRALayer, lora_linear, lora_linears
from liger_trainer.kernels.lora.lora_mlp import lora_down, lora_mlp
from liger_trainer.kernels.lora.nf4 import NestedAbsmax, NF4Weight, nf4_dequantize
from liger_trainer.kernels.mlp.glu import geglu, geglu_down, geglu_fused, swiglu, swiglu_down, swiglu_fused
from liger_trainer.kernels.mlp.relu_squared import relu_squared
from liger_trainer.kernels.moe.experts import ExpertLoRA, moe_experts
from liger_trainer.kernels.moe.router import grouped_topk_sigmoid_routing, topk_softmax_routing
from liger_trainer.kernels.moe.sort_by_expert import ExpertRows, sort_by_expert, tile_table
from liger_trainer.kernels.norms.gated_rms_norm import gated_rms_norm
from liger_trainer.kernels.norms.layer_norm import layer_norm
from liger_trainer.kernels.norms.rms_norm import rms_norm
from liger_trainer.kernels.recurrence.decayed_attention import decayed_attention
from liger_trainer.kernels.recurrence.delta_rule import delta_rule
from liger_trainer.kernels.recurrence.state_space import state_space
from liger_trainer.kernels.rope.layouts import rope_complex, rope_multimodal, rope_vision
from liger_trainer.kernels.rope.qk_norm_rope import qk_norm_rope
from liger_trainer.kernels.rope.rope import rope
from liger_trainer.liger.operators.clamped_swiglu import clamped_swiglu
from liger_trainer.liger.operators.dyt import dyt
from liger_trainer.liger.operators.embedding import embedding, embedding_backward_, tied_embedding
from liger_trainer.liger.operators.fused_add_norms import fused_add_layer_norm, fused_add_rms_norm
from liger_trainer.liger.operators.fused_ce_tvd import fused_ce_tvd
from liger_trainer.liger.operators.group_norm import group_norm
from liger_trainer.liger.operators.grpo_loss import GRPOLossOutput, grpo_loss, grpo_loss_from_log_probs
from liger_trainer.liger.operators.linear_kl_div import linear_kl_div
from liger_trainer.liger.operators.modulated_rms_norm import modulated_rms_norm
from liger_trainer.liger.operators.poly_norm import poly_norm
from liger_trainer.liger.operators.softmax import multi_token_attention, softmax, sparsemax
from liger_trainer.parallel.router_losses import RouterLosses, load_balancing_loss, router_losses, router_z_loss
from liger_trainer.parallel.vocab_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_cross_entropy,
    vocab_parallel_linear_log_probs,
)
from liger_trainer.tiling.tiled_mlp import tiled_mlp

__all__ = [
    "CrossEntropyOutput",
    "DivergenceOutput",
    "Documents",
    "ExpertLoRA",
    "ExpertRows",
    "GRPOLossOutput",
    "LoRA",
    "LoRALayer",
    "LogProbsOutput",
    "NF4Weight",
    "NestedAbsmax",
    "RouterLosses",
    "clamped_swiglu",
    "cross_entropy",
    "decayed_attention",
    "delta_gates",
    "delta_inputs",
    "delta_rule",
    "documents_of",
    "dyt",
    "embedding",
    "embedding_backward_",
    "expand_keys",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_ce_tvd",
    "gated_rms_norm",
    "gated_short_conv",
    "geglu",
    "geglu_down",
    "geglu_fused",
    "group_norm",
    "grouped_topk_sigmoid_routing",
    "grpo_loss",
    "grpo_loss_from_log_probs",
    "jsd",
    "kl_div",
    "layer_norm",
    "linear_cosine_distance",
    "linear_cross_entropy",
    "linear_jsd",
    "linear_kl",
    "linear_kl_div",
    "linear_log_probs",
    "load_balancing_loss",
    "log_probs",
    "lora_down",
    "lora_linear",
    "lora_linears",
    "lora_mlp",
    "modulated_rms_norm",
    "moe_experts",
    "multi_token_attention",
    "nf4_dequantize",
    "poly_norm",
    "qk_norm_rope",
    "relu_squared",
    "rms_norm",
    "rope",
    "rope_complex",
    "rope_multimodal",
    "rope_vision",
    "router_losses",
    "router_z_loss",
    "short_conv",
    "softmax",
    "sort_by_expert",
    "sparsemax",
    "state_space",
    "swiglu",
    "swiglu_down",
    "swiglu_fused",
    "tied_embedding",
    "tile_table",
    "tiled_mlp",
    "topk_softmax_routing",
    "tvd",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "vocab_parallel_linear_log_probs",
]
