"""What Liger has as `torch.autograd.Function`: classes of its names, whose `apply` takes and returns what Liger's does.

Only `apply` is there: the graph is that of the operators, so there is no `forward` or `backward` to call by itself.
Arguments that choose among Liger's backends (`ce_impl`, `jsd_mode`, `row_mode`, ...) have no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_trainer import functional as operators
from liger_trainer import nn
from liger_trainer.functional import CrossEntropyOutput
from liger_trainer.liger import functional
from liger_trainer.losses import functional as losses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _outputs(result: Tensor | CrossEntropyOutput) -> _Outputs:
    if isinstance(result, Tensor):
        return result, None, None, None
    return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens


def _cross_entropy(
    _input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> _Outputs:
    result = functional.liger_cross_entropy(
        *(_input, target, weight, None, ignore_index, None, reduction, label_smoothing, lse_square_scale, softcap),
        *(return_z_loss, return_token_accuracy, return_predicted_tokens),
    )
    return _outputs(result)


def _linear_cross_entropy(
    _input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    ignore_index: int = -100,
    lse_square_scale: float = 0.0,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    softcap: float | None = None,
    return_z_loss: bool = False,
    accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    ce_impl: Any = None,
    ce_mode: Any = None,
    chunk_mem_const: int = 1,
) -> _Outputs:
    result = functional.liger_fused_linear_cross_entropy(
        *(_input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap),
        *(return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens),
    )
    return _outputs(result)


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


def _linear_jsd(
    student_input: Tensor,
    student_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    shift_labels: Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
    jsd_impl: Any = None,
    jsd_mode: Any = None,
) -> Tensor:
    return functional.liger_fused_linear_jsd(
        *(student_input, student_weight, teacher_input, teacher_weight, shift_labels),
        *(jsd_beta, ignore_index, temperature, accum_dtype),
    )


def _jsd(
    _input: Tensor,
    target: Tensor,
    shift_labels: Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
    jsd_impl: Any = None,
    jsd_mode: Any = None,
) -> Tensor:
    return operators.jsd(_input, target, shift_labels, beta, ignore_index)


def _rms_norm(
    X: Tensor,
    W: Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
    row_mode: Any = None,
) -> Tensor:
    return operators.rms_norm(X, W, eps, offset, casting_mode)


def _kl_div(
    y_pred: Tensor, y_true: Tensor, reduction: str = "batchmean", log_target: bool = False, eps: float = 1e-10
) -> Tensor:
    return operators.kl_div(y_pred, y_true, reduction, log_target, eps)


def _tvd(
    p: Tensor,
    q: Tensor,
    shift_labels: Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
) -> Tensor:
    return operators.tvd(p, q, shift_labels, reduction, ignore_index)


def _silu_mul(a: Tensor, b: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
    return operators.swiglu(a, b, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier)


def _fused_silu_mul(y: Tensor, in_place: bool = False) -> Tensor:
    return operators.swiglu_fused(y)


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


def _moe(x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return operators.moe_experts(x, top_k_index, top_k_weights, gate_up_proj, down_proj)


def _tiled_mlp(
    fn: Callable[[torch.nn.Module, Tensor], Tensor],
    mlp_module: torch.nn.Module,
    x: Tensor,
    shards: int,
    compute_params: Sequence[torch.nn.Parameter] | None = None,
) -> Tensor:
    return operators.tiled_mlp(fn, mlp_module, x, shards)


def _embedding(embeddings: Tensor, indices: Tensor) -> Tensor:
    return operators.embedding(indices, embeddings)


def _llama4_rope(q: Tensor, k: Tensor, freqs_cis: Tensor, BLOCK_SIZE: int | None = None) -> tuple[Tensor, Tensor]:
    return operators.rope_complex(q, k, freqs_cis)


def _vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None,
    ignore_index: int,
    label_smoothing: float,
    label_smoothing_formula: str,
    label_smoothing_mode: str,
) -> Tensor:
    loss = nn.LigerVocabParallelCrossEntropy(
        ignore_index, label_smoothing, "none", label_smoothing_formula, label_smoothing_mode
    )
    return loss(vocab_parallel_logits, target, tp_group)


def _mhc_coeffs(
    x: Tensor,
    phi: Tensor,
    b: Tensor,
    alpha_pre: Tensor,
    alpha_post: Tensor,
    alpha_res: Tensor,
    allow_fp32: bool,
    tmax: int,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return functional.liger_mhc_coeffs(
        *(x, phi, b, alpha_pre, alpha_post, alpha_res),
        tmax=tmax,
        rms_eps=rms_eps,
        pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps,
        post_mult=post_mult,
    )


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "LigerAttnResFunction": functional.liger_attn_res,
    "LigerCrossEntropyFunction": _cross_entropy,
    "LigerDyTFunction": functional.liger_dyt,
    "LigerEmbeddingFunction": _embedding,
    "LigerFusedAddRMSNormFunction": functional.liger_fused_add_rms_norm,
    "LigerFusedCETVDFunction": operators.fused_ce_tvd,
    "LigerFusedGateUpSiLUMulFunction": _fused_silu_mul,
    "LigerFusedLinearCrossEntropyFunction": _linear_cross_entropy,
    "LigerFusedLinearJSDFunction": _linear_jsd,
    "LigerFusedLinearKLDivFunction": functional.liger_fused_linear_kl_div,
    "LigerFusedLinearScaledCrossEntropyFunction": _scaled_cross_entropy,
    "LigerFusedLinearScaledCrossEntropyTPFunction": functional.liger_fused_linear_scaled_cross_entropy_tp,
    "LigerFusedMoEFunction": _moe,
    "LigerFusedNeighborhoodAttentionFunction": functional.liger_fused_neighborhood_attention,
    "LigerGELUMulFunction": functional.liger_geglu,
    "LigerGroupNormFunction": functional.liger_group_norm,
    "LigerJSDFunction": _jsd,
    "LigerKLDivLossFunction": _kl_div,
    "LigerLayerNormFunction": functional.liger_layer_norm,
    "LigerLlama4RopeFunction": _llama4_rope,
    "LigerMHCCoeffsFunction": _mhc_coeffs,
    "LigerMHCPostResFunction": functional.liger_mhc_post_res,
    "LigerMHCPreFunction": functional.liger_mhc_pre,
    "LigerMLPFunction": _mlp,
    "LigerModulatedRMSNormFunction": functional.liger_modulated_rms_norm,
    "LigerMultiTokenAttentionFunction": functional.liger_multi_token_attention,
    "LigerPolyNormFunction": functional.liger_poly_norm,
    "LigerQwen2VLMRopeFunction": functional.liger_qwen2vl_mrope,
    "LigerReLUSquaredFunction": functional.liger_relu_squared,
    "LigerRMSNormFunction": _rms_norm,
    "LigerRopeFunction": functional.liger_rope,
    "LigerSiLUMulFunction": _silu_mul,
    "LigerSoftmaxFunction": functional.liger_softmax,
    "LigerSparsemaxFunction": functional.liger_sparsemax,
    "LigerTVDLossFunction": _tvd,
    "LigerTiledMLPFunction": _tiled_mlp,
    "LigerVocabParallelCEFunction": _vocab_parallel_cross_entropy,
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
