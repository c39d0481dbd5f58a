"""The functions of `liger_kernel.transformers.functional`, with their names and the order of their arguments.

Most are a row: Liger's signature, and the operator in [`liger_trainer.functional`] or the module in
[`liger_trainer.nn`] that it calls and that describes the arguments. Losses are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from liger_trainer import functional as operators
from liger_trainer import nn
from liger_trainer.functional import CrossEntropyOutput, LogProbsOutput
from liger_trainer.liger.hyper_connections import liger_mhc_apply as liger_mhc_apply
from liger_trainer.liger.hyper_connections import liger_mhc_coeffs as liger_mhc_coeffs
from liger_trainer.liger.hyper_connections import liger_mhc_forward as liger_mhc_forward
from liger_trainer.liger.hyper_connections import liger_mhc_post_res as liger_mhc_post_res
from liger_trainer.liger.hyper_connections import liger_mhc_pre as liger_mhc_pre
from liger_trainer.liger.spelling import spelled

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

liger_cross_entropy: Callable[..., torch.Tensor | CrossEntropyOutput] = spelled(
    "liger_cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, "
    "reduction='mean', label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, "
    "return_token_accuracy=False, return_predicted_tokens=False)",
    nn.LigerCrossEntropyLoss,
    input="_input",
)
liger_fused_linear_cross_entropy: Callable[..., torch.Tensor | CrossEntropyOutput] = spelled(
    "liger_fused_linear_cross_entropy(input, weight, target, bias=None, ce_weight=None, ignore_index=-100, "
    "lse_square_scale=0.0, label_smoothing=0.0, reduction='mean', softcap=None, return_z_loss=False, accum_dtype=None, "
    "use_token_scaling=False, return_token_accuracy=False, return_predicted_tokens=False, chunk_mem_const=1)",
    nn.LigerFusedLinearCrossEntropyLoss,
    input="_input",
    weight="lin_weight",
)
liger_fused_linear_jsd: Callable[..., torch.Tensor] = spelled(
    "liger_fused_linear_jsd(student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, "
    "jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None)",
    nn.LigerFusedLinearJSD,
)
liger_fused_linear_kl_div: Callable[..., torch.Tensor] = spelled(
    "liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels=None, reduction='batchmean', "
    "ignore_index=-100, temperature=1.0, eps=1e-10, accum_dtype=None)",
    nn.LigerFusedLinearKLDivLoss,
)
liger_jsd = spelled(
    "liger_jsd(input, target, shift_labels=None, beta=0.5, ignore_index=-100)",
    operators.jsd,
    input="log_q",
    target="log_p",
    shift_labels="labels",
)
liger_kl_div = spelled(
    "liger_kl_div(input, target, size_average=True, reduce=True, reduction='mean', log_target=False, eps=1e-10)",
    operators.kl_div,
    input="y_pred",
    target="y_true",
)
liger_tvd = spelled(
    "liger_tvd(input, target, shift_labels=None, reduction='mean', ignore_index=-100)",
    operators.tvd,
    input="p",
    target="q",
    shift_labels="labels",
)
liger_geglu = spelled("liger_geglu(a, b)", operators.geglu, a="gate", b="up")
liger_swiglu = spelled("liger_swiglu(a, b)", operators.swiglu, a="gate", b="up")
liger_relu_squared = spelled("liger_relu_squared(x)", operators.relu_squared)
liger_softmax = spelled("liger_softmax(x)", operators.softmax)
liger_sparsemax = spelled("liger_sparsemax(input, dim=-1)", operators.sparsemax, input="x")
liger_multi_token_attention = spelled(
    "liger_multi_token_attention(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False)",
    operators.multi_token_attention,
)
liger_dyt = spelled("liger_dyt(x, alpha, gamma, beta)", operators.dyt)
liger_group_norm = spelled(
    "liger_group_norm(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps)",
    operators.group_norm,
    X="x",
    affine_scaling_weight="weight",
    affine_shifting_bias="bias",
)
_NORM = {"X": "x", "R": "residual", "W": "weight", "B": "bias", "casting_mode": "casting"}
liger_layer_norm = spelled("liger_layer_norm(X, W, B, eps)", operators.layer_norm, **_NORM)
liger_poly_norm = spelled("liger_poly_norm(X, W, B, eps=1e-6, in_place=True)", operators.poly_norm, **_NORM)
liger_rms_norm = spelled(
    "liger_rms_norm(X, W, eps, offset=0.0, casting_mode='llama', in_place=True)", operators.rms_norm, **_NORM
)
liger_fused_add_rms_norm = spelled(
    "liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode='llama', in_place=True)",
    operators.fused_add_rms_norm,
    **_NORM,
)
liger_modulated_rms_norm = spelled(
    "liger_modulated_rms_norm(X, W, scale, shift=None, eps=1e-6, offset=0.0, casting_mode='llama', in_place=True)",
    operators.modulated_rms_norm,
    **_NORM,
)
liger_rope = spelled(
    "liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None)", nn.liger_rotary_pos_emb
)
liger_qwen2vl_mrope = spelled(
    "liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1)", nn.liger_multimodal_rotary_pos_emb
)


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

    The arguments are those of [`liger_trainer.functional.vocab_parallel_linear_log_probs`], `return_entropy`, which
    returns the entropy of every token too, and `tiles_per_reduce`, which has no effect.

    Returns:
        float32, (tokens,), or two of them.
    """
    outputs = ("entropy",) if return_entropy else ()
    result = operators.vocab_parallel_linear_log_probs(
        input, weight, target, tp_group, ignore_index=ignore_index, temperature=temperature, outputs=outputs
    )
    return negative_log_likelihood(result)


def negative_log_likelihood(result: torch.Tensor | LogProbsOutput) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """What Liger returns where our operators return log-probabilities, or these with the entropy."""
    if isinstance(result, torch.Tensor):
        return -result
    assert result.entropy is not None
    return -result.log_probs, result.entropy


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
        dilation: Distance of these positions.
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


__all__ = ["CrossEntropyOutput", *(name for name in globals() if name.startswith("liger_"))]
