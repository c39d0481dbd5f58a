"""Liger's modules and what they hold here: one table from a module's path and a name to our object."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from liger_trainer.liger.model_types import ROWS

_NN = "liger_trainer.nn"
_APPLY = "liger_trainer.liger.apply"
_LOSSES = "liger_trainer.losses"
_FUNCTIONS = "liger_trainer.liger.autograd_functions:OPERATIONS"
_LOSS_FUNCTIONS = "liger_trainer.liger.autograd_functions:LOSSES"
_HELPERS = "liger_trainer.liger.helpers"

# Module of Liger's, below `liger_kernel` -> where its names are here -> the names; "*" are all in `__all__` there.
MODULES: dict[str, dict[str, str]] = {
    "chunked_loss.cosine_similarity_loss": {
        _LOSSES: "LigerFusedLinearCosineSimilarityLoss",
        _LOSS_FUNCTIONS: "LigerFusedLinearCosineSimilarityFunction",
    },
    **{
        f"chunked_loss.{name.lower()}_loss": {
            _LOSSES: f"LigerFusedLinear{name}Loss",
            _LOSS_FUNCTIONS: f"LigerFusedLinear{name}Function",
        }
        for name in ("CPO", "DPO", "GRPO", "JSD", "KTO", "ORPO", "SimPO")
    },
    "chunked_loss.functional": {"liger_trainer.liger.losses.functional": "*"},
    "chunked_loss.fused_linear_distillation": {
        "liger_trainer.liger.nn.distillation": "LigerFusedLinearDistillationBase"
    },
    "chunked_loss.fused_linear_ppo": {},  # as the other empty ones, so that the error has the reason of `ABSENT`
    "chunked_loss.fused_linear_preference": {},
    "chunked_loss.fused_linear_unpaired_preference": {},
    "ops.attn_res": {_FUNCTIONS: "LigerAttnResFunction"},
    "ops.cross_entropy": {_FUNCTIONS: "LigerCrossEntropyFunction"},
    "ops.dyt": {_FUNCTIONS: "LigerDyTFunction"},
    "ops.experimental.embedding": {_FUNCTIONS: "LigerEmbeddingFunction"},
    "ops.fused_add_rms_norm": {_FUNCTIONS: "LigerFusedAddRMSNormFunction"},
    "ops.fused_ce_tvd": {_FUNCTIONS: "LigerFusedCETVDFunction"},
    "ops.fused_linear_cross_entropy": {_FUNCTIONS: "LigerFusedLinearCrossEntropyFunction"},
    "ops.fused_linear_jsd": {_FUNCTIONS: "LigerFusedLinearJSDFunction"},
    "ops.fused_linear_kl_div": {_FUNCTIONS: "LigerFusedLinearKLDivFunction"},
    "ops.fused_linear_scaled_cross_entropy": {
        _FUNCTIONS: "LigerFusedLinearScaledCrossEntropyFunction LigerFusedLinearScaledCrossEntropyTPFunction"
    },
    "ops.fused_moe": {_FUNCTIONS: "LigerFusedMoEFunction"},
    "ops.fused_neighborhood_attention": {_FUNCTIONS: "LigerFusedNeighborhoodAttentionFunction"},
    "ops.geglu": {_FUNCTIONS: "LigerGELUMulFunction"},
    "ops.group_norm": {_FUNCTIONS: "LigerGroupNormFunction"},
    "ops.grpo_loss": {_HELPERS: "fused_selective_log_softmax"},
    "ops.jsd": {_FUNCTIONS: "LigerJSDFunction"},
    "ops.kl_div": {_FUNCTIONS: "LigerKLDivLossFunction"},
    "ops.layer_norm": {_FUNCTIONS: "LigerLayerNormFunction"},
    "ops.llama4_rope": {_FUNCTIONS: "LigerLlama4RopeFunction"},
    "ops.mhc": {_FUNCTIONS: "LigerMHCCoeffsFunction LigerMHCPostResFunction LigerMHCPreFunction"},
    "ops.mlp": {_FUNCTIONS: "LigerMLPFunction"},
    "ops.modulated_rms_norm": {_FUNCTIONS: "LigerModulatedRMSNormFunction"},
    "ops.multi_token_attention": {_FUNCTIONS: "LigerMultiTokenAttentionFunction"},
    "ops.poly_norm": {_FUNCTIONS: "LigerPolyNormFunction"},
    "ops.qwen2vl_mrope": {_FUNCTIONS: "LigerQwen2VLMRopeFunction"},
    "ops.relu_squared": {_FUNCTIONS: "LigerReLUSquaredFunction"},
    "ops.rms_norm": {_FUNCTIONS: "LigerRMSNormFunction"},
    "ops.rope": {_FUNCTIONS: "LigerRopeFunction"},
    "ops.softmax": {_FUNCTIONS: "LigerSoftmaxFunction"},
    "ops.sparsemax": {_FUNCTIONS: "LigerSparsemaxFunction"},
    "ops.swiglu": {_FUNCTIONS: "LigerFusedGateUpSiLUMulFunction LigerSiLUMulFunction"},
    "ops.tiled_mlp": {_FUNCTIONS: "LigerTiledMLPFunction", _HELPERS: "apply_tiled_mlp"},
    "ops.tvd": {_FUNCTIONS: "LigerTVDLossFunction"},
    "ops.utils": {_HELPERS: "compare_version ensure_contiguous infer_device is_hip"},
    "ops.vocab_parallel_cross_entropy": {_FUNCTIONS: "LigerVocabParallelCEFunction"},
    "transformers.auto_model": {"liger_trainer.liger.apply": "AutoLigerKernelForCausalLM"},
    "transformers.cross_entropy": {_NN: "LigerCrossEntropyLoss"},
    "transformers.dyt": {_NN: "LigerDyT"},
    "transformers.experimental.embedding": {_NN: "LigerEmbedding"},
    "transformers.fsdp": {_HELPERS: "_FSDPForwardRedirection"},
    "transformers.functional": {"liger_trainer.liger.functional": "*"},
    "transformers.fused_add_rms_norm": {_NN: "LigerFusedAddRMSNorm"},
    "transformers.fused_ce_tvd": {_NN: "LigerFusedCETVDLoss"},
    "transformers.fused_linear_cross_entropy": {_NN: "LigerFusedLinearCrossEntropyLoss"},
    "transformers.fused_linear_jsd": {_NN: "LigerFusedLinearJSD"},
    "transformers.fused_linear_kl_div": {_NN: "LigerFusedLinearKLDivLoss"},
    "transformers.fused_neighborhood_attention": {},
    "transformers.geglu": {_NN: "LigerGEGLUMLP LigerGEGLUMLPForGemma4"},
    "transformers.group_norm": {_NN: "LigerGroupNorm"},
    "transformers.grpo_loss": {_NN: "triton_grpo_loss", _HELPERS: "fused_selective_log_softmax"},
    "transformers.jsd": {_NN: "LigerJSD"},
    "transformers.kl_div": {_NN: "LigerKLDIVLoss"},
    "transformers.layer_norm": {_NN: "LigerLayerNorm"},
    "transformers.llama4_rope": {_NN: "liger_llama4_text_rotary_pos_emb liger_llama4_vision_rotary_pos_emb"},
    "transformers.mhc": {"liger_trainer.liger.hyper_connections": "LigerMHC"},
    "transformers.mlp": {_NN: "LigerFalconH1MLP LigerMLP"},
    "transformers.model.loss_utils": {
        "liger_trainer.liger.helpers": (
            "LigerForCausalLMLoss fixed_fused_linear_cross_entropy unpack_cross_entropy_result"
        ),
        "liger_trainer.functional": "CrossEntropyOutput",
    },
    "transformers.modulated_rms_norm": {_NN: "LigerModulatedRMSNorm"},
    "transformers.moe": {},
    "transformers.monkey_patch": {
        _APPLY: " ".join(
            (
                *("MODEL_TYPE_TO_APPLY_LIGER_FN", "_apply_liger_kernel", "_apply_liger_kernel_to_instance"),
                *(f"apply_liger_kernel_to_{name}" for name in ROWS),
            )
        )
    },
    "transformers.multi_token_attention": {_NN: "LigerMultiTokenAttention"},
    "transformers.poly_norm": {_NN: "LigerPolyNorm"},
    "transformers.qwen2vl_mrope": {_NN: "liger_multimodal_rotary_pos_emb"},
    "transformers.relu_squared": {_NN: "LigerReLUSquared"},
    "transformers.rms_norm": {
        _NN: (
            "LigerRMSNorm LigerRMSNormForGemma LigerRMSNormForGemma2 LigerRMSNormForGemma3 LigerRMSNormForGemma4 "
            "LigerRMSNormForGlm4 LigerRMSNormForMuseGlimmer LigerRMSNormForMuseGlimmerTextCentered "
            "LigerRMSNormForOlmo2 LigerRMSNormForQwen3Next"
        )
    },
    "transformers.rope": {_NN: "liger_rotary_pos_emb liger_rotary_pos_emb_gpt_oss liger_rotary_pos_emb_vision"},
    "transformers.softmax": {_NN: "LigerSoftmax"},
    "transformers.sparsemax": {_NN: "LigerSparsemax"},
    "transformers.swiglu": {
        _NN: (
            "LigerBlockSparseTop2MLP LigerExperts LigerFalconH1SwiGLUMLP LigerHunyuanV1SwiGLUMLP LigerPhi3SwiGLUMLP "
            "LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP LigerSwiGLUMLPForMuseGlimmer"
        )
    },
    "transformers.tiled_mlp": {_NN: "LigerTiledGEGLUMLP LigerTiledSwiGLUMLP"},
    "transformers.trainer": {"liger_trainer": "LigerORPOTrainer"},
    "transformers.trainer.orpo_trainer": {"liger_trainer": "LigerORPOTrainer", _HELPERS: "_FSDPForwardRedirection"},
    "transformers.trainer_integration": {_APPLY: "_apply_liger_kernel"},
    "transformers.tvd": {_NN: "LigerTVDLoss"},
    "transformers.vocab_parallel_cross_entropy": {_NN: "LigerVocabParallelCrossEntropy"},
    "utils": {
        _HELPERS: (
            "PEFT_AVAILABLE get_total_gpu_memory infer_comm_backend infer_device is_npu_available is_peft_available "
            "transformers_version_dispatch"
        )
    },
}
# A package offers what the modules in it do, but those whose names are its inside, and what is its own.
_NOT_IN_PACKAGE = (
    *("chunked_loss.functional", "chunked_loss.fused_linear_distillation", "ops.utils"),
    *("transformers.fsdp", "transformers.functional", "transformers.model.loss_utils"),
    *("transformers.trainer", "transformers.trainer.orpo_trainer"),
)
_OWN = {"transformers": {"is_transformers_available": _HELPERS}}

_BACKENDS = "it is part of Liger's own kernels"
_FORMULA = "its hooks do not exist here; a loss of one's own is written with liger_trainer.functional.linear_log_probs"
_NEIGHBORHOOD = "no supported model has it; liger_fused_neighborhood_attention is the function"
ABSENT = {
    "GrpoLossFunction": "call liger_kernel.transformers.grpo_loss.triton_grpo_loss, which has its arguments",
    "LigerExpertParallelFusedMoe": "experts that transformers splits over processes are patched by apply_liger_kernel",
    "LigerFusedLinearPPOBase": _FORMULA,
    "LigerFusedLinearPreferenceBase": _FORMULA,
    "LigerFusedLinearUnpairedPreferenceBase": _FORMULA,
    "LigerFusedNeighborhoodAttention": _NEIGHBORHOOD,
    "LigerFusedNeighborhoodAttentionConfig": _NEIGHBORHOOD,
    "LigerFusedNeighborhoodAttentionLayer": _NEIGHBORHOOD,
    "amp_custom_bwd": _BACKENDS,
    "amp_custom_fwd": _BACKENDS,
    "apply_liger_llama4_rope_full": "call apply_liger_kernel_to_llama4",
    "calculate_settings": _BACKENDS,
    "element_mul_kernel": _BACKENDS,
    "liger_cross_entropy_kernel": _BACKENDS,
    "torch_to_triton_dtype": _BACKENDS,
}
"""Names of Liger's that are not offered, with the reason."""


@functools.cache
def names(module: str) -> dict[str, str]:
    """What the module of Liger's called `module`, such as ``"liger_kernel.ops"``, holds: name -> our module.

    Raises:
        ModuleNotFoundError: if there is no such module here.
    """
    path = module.removeprefix("liger_kernel").lstrip(".")
    found = {name: place for place, listed in MODULES.get(path, {}).items() for name in _listed(place, listed)}
    if path in ("chunked_loss", "ops", "transformers"):
        for inner in MODULES:
            if inner.startswith(f"{path}.") and inner not in _NOT_IN_PACKAGE:
                found |= names(f"liger_kernel.{inner}")
        found |= _OWN.get(path, {})
    if path not in MODULES and not is_package(module):
        raise ModuleNotFoundError(f"liger_trainer has nothing in the place of {module}.", name=module)
    return found


def is_package(module: str) -> bool:
    """Whether modules of the table are in `module`."""
    path = module.removeprefix("liger_kernel").lstrip(".")
    return not path or any(inner.startswith(f"{path}.") for inner in MODULES)


def find(module: str, name: str) -> Any:
    """Our object for `name` in the module of Liger's called `module`.

    Raises:
        ModuleNotFoundError: if there is no such module here.
        AttributeError: if there is no such name; the text has the reason where it is one of Liger's.
    """
    place = names(module).get(name)
    if place is None:
        reason = ABSENT.get(name, "it is not in the table of docs/liger.md")
        raise AttributeError(f"liger_trainer does not offer {module}.{name}: {reason}.")
    path, _, table = place.partition(":")
    holder = importlib.import_module(path)
    return getattr(holder, table)[name] if table else getattr(holder, name)


def _listed(place: str, listed: str) -> list[str]:
    return importlib.import_module(place).__all__ if listed == "*" else listed.split()
