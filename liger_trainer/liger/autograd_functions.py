"""What Liger has as `torch.autograd.Function`: classes of its names, whose `apply` takes and returns what Liger's does.

Only `apply` is there: the graph is that of the operators, so there is no `forward` or `backward` to call by itself.
A row is Liger's signature and what it calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from liger_trainer import functional as operators
from liger_trainer import nn
from liger_trainer.liger import functional
from liger_trainer.liger.spelling import spelled
from liger_trainer.losses import functional as losses

_Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _with_outputs(signature: str, loss: type[torch.nn.Module], **ours: str) -> Callable[..., _Outputs]:
    """`spelled`, with the four results of Liger's cross entropies, each None unless asked for."""
    function = spelled(signature, loss, **ours)

    @functools.wraps(function)
    def apply(*args: Any, **kwargs: Any) -> _Outputs:
        result = function(*args, **kwargs)
        if isinstance(result, Tensor):
            return result, None, None, None
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens

    return apply


def _scaled_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float = 1.0,
    ignore_index: int = -100,
    m_tiles_per_cluster: int = 1,
    return_entropy: bool = False,
    selected_token_ids: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    if selected_token_ids is not None:
        raise ValueError(
            "`selected_token_ids` is given; it must be None: log-probabilities are made of one id a token, the target. "
            "Call this once for each id, with targets of that id."
        )
    outputs = ("entropy",) if return_entropy else ()
    result = operators.linear_log_probs(
        _input, weight, target, ignore_index=ignore_index, temperature=temperature, outputs=outputs
    )
    return functional.negative_log_likelihood(result)


def _mlp(
    input: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
) -> Tensor:
    gate, up = input @ gate_weight.t(), input @ up_weight.t()
    return operators.swiglu_down(
        gate, up, down_weight, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier
    )


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "LigerAttnResFunction": functional.liger_attn_res,
    "LigerCrossEntropyFunction": _with_outputs(
        "apply(_input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', "
        "softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False)",
        nn.LigerCrossEntropyLoss,
    ),
    "LigerDyTFunction": functional.liger_dyt,
    "LigerEmbeddingFunction": spelled(
        "apply(embeddings, indices)", operators.embedding, embeddings="weight", indices="ids"
    ),
    "LigerFusedAddRMSNormFunction": functional.liger_fused_add_rms_norm,
    "LigerFusedCETVDFunction": operators.fused_ce_tvd,
    "LigerFusedGateUpSiLUMulFunction": spelled("apply(y, in_place=False)", operators.swiglu_fused, y="gate_up"),
    "LigerFusedLinearCrossEntropyFunction": _with_outputs(
        "apply(_input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, "
        "label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False, accum_dtype=None, "
        "use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, "
        "ce_mode=None, chunk_mem_const=1)",
        nn.LigerFusedLinearCrossEntropyLoss,
        weight="lin_weight",
    ),
    "LigerFusedLinearJSDFunction": spelled(
        "apply(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, "
        "ignore_index=-100, temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None)",
        nn.LigerFusedLinearJSD,
    ),
    "LigerFusedLinearKLDivFunction": functional.liger_fused_linear_kl_div,
    "LigerFusedLinearScaledCrossEntropyFunction": _scaled_cross_entropy,
    "LigerFusedLinearScaledCrossEntropyTPFunction": functional.liger_fused_linear_scaled_cross_entropy_tp,
    "LigerFusedMoEFunction": spelled(
        "apply(x, gate_up_proj, down_proj, top_k_index, top_k_weights)",
        operators.moe_experts,
        x="hidden",
        gate_up_proj="gate_up_weight",
        down_proj="down_weight",
    ),
    "LigerFusedNeighborhoodAttentionFunction": functional.liger_fused_neighborhood_attention,
    "LigerGELUMulFunction": functional.liger_geglu,
    "LigerGroupNormFunction": functional.liger_group_norm,
    "LigerJSDFunction": spelled(
        "apply(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None)",
        nn.LigerJSD,
        _input="log_q",
        target="log_p",
    ),
    "LigerKLDivLossFunction": spelled(
        "apply(y_pred, y_true, reduction='batchmean', log_target=False, eps=1e-10)", operators.kl_div
    ),
    "LigerLayerNormFunction": functional.liger_layer_norm,
    "LigerLlama4RopeFunction": spelled("apply(q, k, freqs_cis, BLOCK_SIZE=None)", operators.rope_complex),
    "LigerMHCCoeffsFunction": spelled(
        "apply(x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, "
        "post_mult)",
        functional.liger_mhc_coeffs,
    ),
    "LigerMHCPostResFunction": functional.liger_mhc_post_res,
    "LigerMHCPreFunction": functional.liger_mhc_pre,
    "LigerMLPFunction": _mlp,
    "LigerModulatedRMSNormFunction": functional.liger_modulated_rms_norm,
    "LigerMultiTokenAttentionFunction": functional.liger_multi_token_attention,
    "LigerPolyNormFunction": functional.liger_poly_norm,
    "LigerQwen2VLMRopeFunction": functional.liger_qwen2vl_mrope,
    "LigerReLUSquaredFunction": functional.liger_relu_squared,
    "LigerRMSNormFunction": spelled(
        "apply(X, W, eps, offset=0.0, casting_mode='llama', in_place=True, row_mode=None)", functional.liger_rms_norm
    ),
    "LigerRopeFunction": functional.liger_rope,
    "LigerSiLUMulFunction": spelled(
        "apply(a, b, gate_multiplier=1.0, down_multiplier=1.0)", operators.swiglu, a="gate", b="up"
    ),
    "LigerSoftmaxFunction": functional.liger_softmax,
    "LigerSparsemaxFunction": functional.liger_sparsemax,
    "LigerTVDLossFunction": spelled(
        "apply(p, q, shift_labels=None, reduction='batchmean', ignore_index=-100)", nn.LigerTVDLoss
    ),
    "LigerTiledMLPFunction": spelled(
        "apply(fn, mlp_module, x, shards, compute_params=None)",
        operators.tiled_mlp,
        fn="mlp_forward",
        mlp_module="module",
        shards="num_tiles",
    ),
    "LigerVocabParallelCEFunction": spelled(
        "apply(vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula, "
        "label_smoothing_mode)",
        nn.LigerVocabParallelCrossEntropy,
    ),
}
_LOSSES: dict[str, Callable[..., Any]] = {
    "LigerFusedLinearCPOFunction": losses.liger_fused_linear_cpo,
    "LigerFusedLinearCosineSimilarityFunction": losses.liger_fused_linear_cosine,
    "LigerFusedLinearDPOFunction": losses.liger_fused_linear_dpo,
    "LigerFusedLinearGRPOFunction": losses.liger_fused_linear_grpo,
    "LigerFusedLinearJSDFunction": losses.liger_fused_linear_jsd,
    "LigerFusedLinearKTOFunction": losses.liger_fused_linear_kto,
    "LigerFusedLinearORPOFunction": losses.liger_fused_linear_orpo,
    "LigerFusedLinearSimPOFunction": losses.liger_fused_linear_simpo,
}


def _classes(calls: dict[str, Callable[..., Any]]) -> dict[str, type]:
    return {
        name: type(name, (), {"apply": staticmethod(call), "__doc__": call.__doc__}) for name, call in calls.items()
    }


OPERATIONS = _classes(_OPERATIONS)
"""The classes of `liger_kernel.ops` by their names."""
LOSSES = _classes(_LOSSES)
"""Those of `liger_kernel.chunked_loss`. One name, `LigerFusedLinearJSDFunction`, is in both, with other arguments."""

globals().update(OPERATIONS)
__all__ = [*OPERATIONS]  # which Liger's registry reads from a module of operators
