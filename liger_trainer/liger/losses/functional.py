"""The losses as functions, with the names and the order of arguments of `liger_kernel.chunked_loss.functional`.

Each is a row: Liger's signature, and the module that it calls, which describes the arguments and the results. Hidden
states come before the head here, and some defaults differ from those of the modules, as in Liger.
"""

from __future__ import annotations

from collections.abc import Callable

from liger_trainer.liger.losses.grpo import LigerFusedLinearGRPOLoss
from liger_trainer.liger.losses.pairs import Result
from liger_trainer.liger.losses.preference import (
    LigerFusedLinearCPOLoss,
    LigerFusedLinearDPOLoss,
    LigerFusedLinearKTOLoss,
    LigerFusedLinearORPOLoss,
    LigerFusedLinearSimPOLoss,
)
from liger_trainer.liger.spelling import spelled
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

_Loss = Callable[..., Result]
_DISTILLED = (
    "(student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, teacher_bias=None, "
    "weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True, "
    "chunk_size=1024, return_soft_hard_loss=False)"
)

liger_fused_linear_dpo: _Loss = spelled(
    "liger_fused_linear_dpo(_input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, "
    "ignore_index=-100, beta=0.1, compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, "
    "chunk_size=1, loss_type='sigmoid', label_smoothing=0.0, discopop_tau=0.05, alpha=1.0)",
    LigerFusedLinearDPOLoss,
    weight="lin_weight",
)
liger_fused_linear_orpo: _Loss = spelled(
    "liger_fused_linear_orpo(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, "
    "nll_target=None, compiled=True, chunk_size=1)",
    LigerFusedLinearORPOLoss,
    weight="lin_weight",
)
liger_fused_linear_cpo: _Loss = spelled(
    "liger_fused_linear_cpo(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, "
    "label_smoothing=0.0, compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1)",
    LigerFusedLinearCPOLoss,
    weight="lin_weight",
)
liger_fused_linear_simpo: _Loss = spelled(
    "liger_fused_linear_simpo(_input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, "
    "label_smoothing=0.0, compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1)",
    LigerFusedLinearSimPOLoss,
    weight="lin_weight",
)
liger_fused_linear_kto: _Loss = spelled(
    "liger_fused_linear_kto(_input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, "
    "ref_bias=None, kl=None, ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, "
    "chunk_size=1)",
    LigerFusedLinearKTOLoss,
    weight="lin_weight",
)
liger_fused_linear_grpo: _Loss = spelled(
    "liger_fused_linear_grpo(_input, weight, selected_token_ids, attention_mask, advantages, bias=None, "
    "ref_per_token_logps=None, old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, beta=0.04, "
    "epsilon_low=0.2, epsilon_high=0.2, loss_type='dapo', max_completion_length=None, "
    "importance_sampling_level='token', sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0, "
    "compiled=True, use_ref_model=True, chunk_size=1, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, "
    "vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None)",
    LigerFusedLinearGRPOLoss,
    weight="lin_weight",
)
liger_fused_linear_jsd = spelled(f"liger_fused_linear_jsd{_DISTILLED}", LigerFusedLinearJSDLoss)
liger_fused_linear_cosine = spelled(f"liger_fused_linear_cosine{_DISTILLED}", LigerFusedLinearCosineSimilarityLoss)
