"""The functions of `liger_kernel.transformers.functional`, with their names and the order of their arguments.

Each is a call of the operator in [`liger_trainer.functional`] or the module in [`liger_trainer.nn`] that describes it.
Arguments that only steer how Liger's kernels work inside (`in_place`, `accum_dtype`, `chunk_mem_const`,
`tiles_per_reduce`, `position_ids`) are accepted and have no effect. Losses are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from liger_trainer import functional as operators
from liger_trainer import nn
from liger_trainer.functional import CrossEntropyOutput, LogProbsOutput
from liger_trainer.liger.hyper_connections import (
    liger_mhc_apply,
    liger_mhc_coeffs,
    liger_mhc_forward,
    liger_mhc_post_res,
    liger_mhc_pre,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "CrossEntropyOutput",
    "liger_attn_res",
    "liger_cross_entropy",
    "liger_dyt",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kl_div",
    "liger_fused_linear_scaled_cross_entropy_tp",
    "liger_fused_neighborhood_attention",
    "liger_geglu",
    "liger_group_norm",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_mhc_apply",
    "liger_mhc_coeffs",
    "liger_mhc_forward",
    "liger_mhc_post_res",
    "liger_mhc_pre",
    "liger_modulated_rms_norm",
    "liger_multi_token_attention",
    "liger_poly_norm",
    "liger_qwen2vl_mrope",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rope",
    "liger_softmax",
    "liger_sparsemax",
    "liger_swiglu",
    "liger_tvd",
]


def liger_cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0,
    softcap: float | None = None,
    return_z_loss: bool = False,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
) -> torch.Tensor | CrossEntropyOutput:
    """See [`liger_trainer.nn.LigerCrossEntropyLoss`]; `size_average` and `reduce` have no effect, as in Liger."""
    loss = nn.LigerCrossEntropyLoss(
        *(weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap),
        *(return_z_loss, return_token_accuracy, return_predicted_tokens),
    )
    return loss(input, target)


def liger_fused_linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None,
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
    chunk_mem_const: int = 1,
) -> torch.Tensor | CrossEntropyOutput:
    """See [`liger_trainer.nn.LigerFusedLinearCrossEntropyLoss`]."""
    loss = nn.LigerFusedLinearCrossEntropyLoss(
        *(ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss, accum_dtype),
        *(use_token_scaling, return_token_accuracy, return_predicted_tokens),
    )
    return loss(weight, input, target, bias)


def liger_fused_linear_scaled_cross_entropy_tp(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    tp_group: ProcessGroup,
    temperature: float = 1.0,
    ignore_index: int = -100,
    tiles_per_reduce: int = 1,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The negative log-likelihood of every token under a head whose rows are split over `tp_group`.

    See [`liger_trainer.functional.vocab_parallel_linear_log_probs`].

    Args:
        input: Hidden states, (tokens, hidden).
        weight: The rows of this process, (vocab / processes, hidden).
        target: Ids of the whole vocabulary, (tokens,).
        tp_group: The processes, each with as many rows.
        temperature: Divides the logits.
        ignore_index: Target of tokens whose results are 0.
        tiles_per_reduce: No effect.
        return_entropy: Return the entropy of every token too.

    Returns:
        float32, (tokens,), or two of them.
    """
    outputs = ("entropy",) if return_entropy else ()
    result = operators.vocab_parallel_linear_log_probs(
        input, weight, target, tp_group, ignore_index=ignore_index, temperature=temperature, outputs=outputs
    )
    return negative_log_likelihood(result)


def negative_log_likelihood(
    result: torch.Tensor | LogProbsOutput,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What Liger returns where our operators return log-probabilities, or these with the entropy."""
    if isinstance(result, torch.Tensor):
        return -result
    assert result.entropy is not None
    return -result.log_probs, result.entropy


def liger_fused_linear_jsd(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See [`liger_trainer.nn.LigerFusedLinearJSD`]."""
    loss = nn.LigerFusedLinearJSD(jsd_beta, ignore_index, temperature, accum_dtype)
    return loss(student_input, student_weight, teacher_input, teacher_weight, shift_labels)


def liger_fused_linear_kl_div(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "batchmean",
    ignore_index: int = -100,
    temperature: float = 1.0,
    eps: float = 1e-10,
    accum_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See [`liger_trainer.nn.LigerFusedLinearKLDivLoss`]."""
    loss = nn.LigerFusedLinearKLDivLoss(reduction, ignore_index, temperature, eps, accum_dtype)
    return loss(student_input, student_weight, target, shift_labels)


def liger_geglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``gelu_tanh(a) * b``; see [`liger_trainer.functional.geglu`]."""
    return operators.geglu(a, b)


def liger_group_norm(
    X: torch.Tensor,
    affine_scaling_weight: torch.Tensor,
    affine_shifting_bias: torch.Tensor,
    num_channels: int,
    num_groups: int,
    eps: float,
) -> torch.Tensor:
    """See [`liger_trainer.functional.group_norm`]; `num_channels` is that of `X`."""
    return operators.group_norm(X, num_groups, affine_scaling_weight, affine_shifting_bias, eps)


def liger_jsd(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    beta: float = 0.5,
    ignore_index: int = -100,
) -> torch.Tensor:
    """See [`liger_trainer.functional.jsd`]."""
    return operators.jsd(input, target, shift_labels, beta, ignore_index)


def liger_kl_div(
    input: torch.Tensor,
    target: torch.Tensor,
    size_average: bool = True,
    reduce: bool = True,
    reduction: str = "mean",
    log_target: bool = False,
    eps: float = 1e-10,
) -> torch.Tensor:
    """See [`liger_trainer.functional.kl_div`]; `size_average` and `reduce` have no effect, as in Liger."""
    return operators.kl_div(input, target, reduction, log_target, eps)


def liger_sparsemax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """See [`liger_trainer.functional.sparsemax`]."""
    return operators.sparsemax(input, dim)


def liger_multi_token_attention(
    scores: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
    sparse: bool = False,
) -> torch.Tensor:
    """See [`liger_trainer.functional.multi_token_attention`]."""
    return operators.multi_token_attention(scores, weight, bias, stride, padding, dilation, groups, sparse)


def liger_fused_neighborhood_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel_size: int = 7,
    dilation: int = 1,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of each position to the `kernel_size` nearest, `dilation` apart, by torch's SDPA with a mask.

    Args:
        query: (batch, heads, seq, head_dim).
        key: As `query`.
        value: As `query`.
        kernel_size: How many positions, an odd number; less at the ends.
        dilation: Their distance.
        scale: Factor of the scores; None for ``head_dim ** -0.5``.

    Returns:
        (batch, heads, seq, head_dim), in the dtype of `query`.

    Raises:
        ValueError: if `kernel_size` is even, or it or `dilation` is less than 1.
    """
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"`kernel_size` is {kernel_size}; it must be odd and at least 1.")
    if dilation < 1:
        raise ValueError(f"`dilation` is {dilation}; it must be at least 1.")
    position = torch.arange(query.shape[-2], device=query.device)
    distance = position - position[:, None]
    near = (distance.abs() <= kernel_size // 2 * dilation) & (distance % dilation == 0)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, near, scale=scale)


def liger_tvd(
    input: torch.Tensor,
    target: torch.Tensor,
    shift_labels: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> torch.Tensor:
    """See [`liger_trainer.functional.tvd`]."""
    return operators.tvd(input, target, shift_labels, reduction, ignore_index)


def liger_layer_norm(X: torch.Tensor, W: torch.Tensor, B: torch.Tensor, eps: float) -> torch.Tensor:
    """See [`liger_trainer.functional.layer_norm`]."""
    return operators.layer_norm(X, W, B, eps)


def liger_qwen2vl_mrope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mrope_section: Sequence[int],
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`liger_trainer.functional.rope_multimodal`]."""
    return operators.rope_multimodal(q, k, cos, sin, mrope_section, unsqueeze_dim)


def liger_relu_squared(x: torch.Tensor) -> torch.Tensor:
    """See [`liger_trainer.functional.relu_squared`]."""
    return operators.relu_squared(x)


def liger_rms_norm(
    X: torch.Tensor,
    W: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> torch.Tensor:
    """See [`liger_trainer.functional.rms_norm`]."""
    return operators.rms_norm(X, W, eps, offset, casting_mode)


def liger_modulated_rms_norm(
    X: torch.Tensor,
    W: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> torch.Tensor:
    """See [`liger_trainer.functional.modulated_rms_norm`]."""
    return operators.modulated_rms_norm(X, W, scale, shift, eps, offset, casting_mode)


def liger_poly_norm(
    X: torch.Tensor, W: torch.Tensor, B: torch.Tensor, eps: float = 1e-6, in_place: bool = True
) -> torch.Tensor:
    """See [`liger_trainer.functional.poly_norm`]."""
    return operators.poly_norm(X, W, B, eps)


def liger_fused_add_rms_norm(
    X: torch.Tensor,
    R: torch.Tensor,
    W: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    casting_mode: str = "llama",
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`liger_trainer.functional.fused_add_rms_norm`]: the norm of ``X + R``, and that sum."""
    return operators.fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def liger_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    unsqueeze_dim: int = 1,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`liger_trainer.nn.liger_rotary_pos_emb`]."""
    return nn.liger_rotary_pos_emb(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim)


def liger_swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``silu(a) * b``; see [`liger_trainer.functional.swiglu`]."""
    return operators.swiglu(a, b)


def liger_softmax(x: torch.Tensor) -> torch.Tensor:
    """See [`liger_trainer.functional.softmax`]."""
    return operators.softmax(x)


def liger_dyt(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None) -> torch.Tensor:
    """See [`liger_trainer.functional.dyt`]."""
    return operators.dyt(x, alpha, gamma, beta)


def liger_attn_res(
    V: torch.Tensor | Sequence[torch.Tensor], w_query: torch.Tensor, w_norm: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """Attention over depth: the outputs of blocks, weighted by the softmax of a query's scores of their norms.

    In plain torch, in float32; from https://arxiv.org/abs/2603.15031.

    Args:
        V: The outputs, (blocks, ..., hidden), or a sequence of (..., hidden).
        w_query: The query, (hidden,).
        w_norm: The weight of the RMSNorm of the keys, (hidden,).
        eps: Added to their mean square.

    Returns:
        (..., hidden), in the dtype of `V`.
    """
    values = V if isinstance(V, torch.Tensor) else torch.stack(tuple(V))
    exact = values.to(torch.promote_types(values.dtype, torch.float32))
    keys = torch.nn.functional.rms_norm(exact, exact.shape[-1:], w_norm.to(exact.dtype), eps)
    scores = (keys * w_query.to(exact.dtype)).sum(-1)
    return (scores.softmax(0).unsqueeze(-1) * exact).sum(0).to(values.dtype)
