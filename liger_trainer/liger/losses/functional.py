"""The losses as functions, with the names and the order of arguments of `liger_kernel.chunked_loss.functional`.

Each takes tensors and then the options of the module of its name, which describes them and the results. Note that
hidden states come before the head here, and that some defaults differ from those of the modules, as in Liger.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.liger.losses.grpo import LigerFusedLinearGRPOLoss
from liger_trainer.liger.losses.kto import LigerFusedLinearKTOLoss
from liger_trainer.liger.losses.pairs import Result
from liger_trainer.liger.losses.preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_trainer.nn import LigerFusedLinearCosineSimilarityLoss, LigerFusedLinearJSDLoss

__all__ = [
    "liger_fused_linear_cosine",
    "liger_fused_linear_cpo",
    "liger_fused_linear_dpo",
    "liger_fused_linear_grpo",
    "liger_fused_linear_jsd",
    "liger_fused_linear_kto",
    "liger_fused_linear_orpo",
    "liger_fused_linear_simpo",
]


def liger_fused_linear_dpo(
    _input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ref_input: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    alpha: float = 1.0,
) -> Result:
    """See [`liger_trainer.losses.LigerFusedLinearDPOLoss`]."""
    loss = LigerFusedLinearDPOLoss(
        *(ignore_index, beta, alpha, compute_nll_loss, compiled, use_ref_model, average_log_prob, chunk_size),
        *(loss_type, label_smoothing, discopop_tau),
    )
    return loss(weight, _input, target, bias, ref_input, ref_weight, ref_bias)


def liger_fused_linear_orpo(
    _input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compute_nll_loss: bool = True,
    nll_target: torch.Tensor | None = None,
    compiled: bool = True,
    chunk_size: int = 1,
) -> Result:
    """See [`liger_trainer.losses.LigerFusedLinearORPOLoss`]."""
    loss = LigerFusedLinearORPOLoss(ignore_index, beta, compute_nll_loss, compiled, chunk_size)
    return loss(weight, _input, target, bias, nll_target)


def liger_fused_linear_cpo(
    _input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = True,
    compiled: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> Result:
    """See [`liger_trainer.losses.LigerFusedLinearCPOLoss`]."""
    loss = LigerFusedLinearCPOLoss(
        ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled, average_log_prob, chunk_size
    )
    return loss(weight, _input, target, bias)


def liger_fused_linear_simpo(
    _input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    alpha: float = 1.0,
    label_smoothing: float = 0.0,
    compute_nll_loss: bool = False,
    compiled: bool = True,
    gamma: float = 0.5,
    chunk_size: int = 1,
) -> Result:
    """See [`liger_trainer.losses.LigerFusedLinearSimPOLoss`]; without the negative log-likelihood unless asked for."""
    loss = LigerFusedLinearSimPOLoss(
        ignore_index, beta, alpha, label_smoothing, compute_nll_loss, compiled, gamma, chunk_size
    )
    return loss(weight, _input, target, bias)


def liger_fused_linear_kto(
    _input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    preference_labels: torch.Tensor,
    bias: torch.Tensor | None = None,
    ref_input: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None,
    kl: torch.Tensor | None = None,
    ignore_index: int = -100,
    beta: float = 0.1,
    compiled: bool = True,
    use_ref_model: bool = True,
    average_log_prob: bool = False,
    chunk_size: int = 1,
) -> Result:
    """See [`liger_trainer.losses.LigerFusedLinearKTOLoss`]; with a reference by default."""
    loss = LigerFusedLinearKTOLoss(ignore_index, beta, compiled, use_ref_model, average_log_prob, chunk_size)
    return loss(_input, weight, target, bias, preference_labels, ref_input, ref_weight, ref_bias, kl)


def liger_fused_linear_grpo(
    _input: torch.Tensor,
    weight: torch.Tensor,
    selected_token_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    advantages: torch.Tensor,
    bias: torch.Tensor | None = None,
    ref_per_token_logps: torch.Tensor | None = None,
    old_per_token_logps: torch.Tensor | None = None,
    ref_input: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None,
    beta: float = 0.04,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    temperature: float = 1.0,
    compiled: bool = True,
    use_ref_model: bool = True,
    chunk_size: int = 1,
    vllm_is_ratio: torch.Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    num_items_in_batch: int | float | torch.Tensor | None = None,
) -> Result:
    """See [`liger_trainer.losses.LigerFusedLinearGRPOLoss`]."""
    loss = LigerFusedLinearGRPOLoss(
        *(beta, compiled, use_ref_model, chunk_size, epsilon_low, epsilon_high, loss_type, max_completion_length),
        *(importance_sampling_level, sapo_temperature_pos, sapo_temperature_neg, temperature, delta),
        *(use_bias_correction_kl, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
    )
    return loss(
        *(_input, weight, selected_token_ids, attention_mask, advantages, bias),
        *(ref_per_token_logps, old_per_token_logps, ref_input, ref_weight, ref_bias),
        *(vllm_is_ratio, num_items_in_batch),
    )


def liger_fused_linear_jsd(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor,
    true_labels: torch.Tensor,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
) -> Any:
    """See [`liger_trainer.losses.LigerFusedLinearJSDLoss`]."""
    loss = LigerFusedLinearJSDLoss(
        *(weight_hard_loss, weight_soft_loss, beta, ignore_index),
        *(temperature, compiled, chunk_size, return_soft_hard_loss),
    )
    return loss(student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias)


def liger_fused_linear_cosine(
    student_input: torch.Tensor,
    student_weight: torch.Tensor,
    teacher_input: torch.Tensor,
    teacher_weight: torch.Tensor,
    true_labels: torch.Tensor,
    student_bias: torch.Tensor | None = None,
    teacher_bias: torch.Tensor | None = None,
    weight_hard_loss: float = 0.5,
    weight_soft_loss: float = 0.5,
    beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    compiled: bool = True,
    chunk_size: int = 1024,
    return_soft_hard_loss: bool = False,
) -> Any:
    """See [`liger_trainer.losses.LigerFusedLinearCosineSimilarityLoss`]."""
    loss = LigerFusedLinearCosineSimilarityLoss(
        *(weight_hard_loss, weight_soft_loss, beta, ignore_index),
        *(temperature, compiled, chunk_size, return_soft_hard_loss),
    )
    return loss(student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias)
