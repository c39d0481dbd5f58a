"""The loss of a causal language model from its hidden states: `liger_kernel.transformers.model.loss_utils`."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from liger_trainer.functional import CrossEntropyOutput
from liger_trainer.liger.functional import liger_fused_linear_cross_entropy


def unpack_cross_entropy_result(result: Any) -> tuple[torch.Tensor, Any, Any, Any]:
    """Loss, z-loss, token accuracy and predicted tokens of a loss, a `CrossEntropyOutput` or a tuple; else None."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    values = [*result] if isinstance(result, tuple) else [result]
    loss, z_loss, accuracy, predicted = (*values, None, None, None)[:4]
    return loss, z_loss, accuracy, predicted


def fixed_fused_linear_cross_entropy(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target: torch.Tensor,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    final_logit_softcapping: float | None = None,
    accum_dtype: torch.dtype | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """The mean loss over the tokens that count, or their sum divided by `num_items_in_batch`.

    Args:
        hidden_states: (tokens, hidden).
        lm_head_weight: (vocab, hidden).
        target: (tokens,), shifted already.
        num_items_in_batch: Divides the sum; None for the mean.
        ignore_index: Target that does not count.
        final_logit_softcapping: Soft-cap of the logits.
        accum_dtype: No effect.
        return_token_accuracy: Return a `CrossEntropyOutput` with the share of right tokens.
        return_predicted_tokens: And with every token's most likely one.
        kwargs: More of [`liger_trainer.liger.functional.liger_fused_linear_cross_entropy`].
    """
    result = liger_fused_linear_cross_entropy(
        hidden_states,
        lm_head_weight,
        target,
        reduction="mean" if num_items_in_batch is None else "sum",
        ignore_index=ignore_index,
        softcap=final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **kwargs,
    )
    loss, _, accuracy, predicted = unpack_cross_entropy_result(result)
    if num_items_in_batch is not None:
        loss = loss / num_items_in_batch
    if return_token_accuracy or return_predicted_tokens:
        return CrossEntropyOutput(loss, token_accuracy=accuracy, predicted_tokens=predicted)
    return loss


def LigerForCausalLMLoss(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    labels: torch.Tensor | None,
    hidden_size: int,
    num_items_in_batch: int | torch.Tensor | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    final_logit_softcapping: float | None = None,
    return_token_accuracy: bool = False,
    return_predicted_tokens: bool = False,
    **kwargs: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """The loss of hidden states whose logits are never built, each against the next label.

    It is `fixed_fused_linear_cross_entropy` of `hidden_states`, (batch, tokens, hidden), whose width is `hidden_size`,
    against `labels`, (batch, tokens), or in their place `shift_labels`, the label of each position. Keywords that
    `liger_fused_linear_cross_entropy` does not take are dropped, as in Liger: models pass all their keywords.

    Returns:
        The float32 loss.
    """
    known = inspect.signature(liger_fused_linear_cross_entropy).parameters
    if shift_labels is None:
        if labels is None:
            raise ValueError("`labels` and `shift_labels` are both None; one of them must be given.")
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size),
        lm_head_weight,
        shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch,
        ignore_index,
        final_logit_softcapping,
        return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
        **{name: value for name, value in kwargs.items() if name in known},
    )
