"""Policy losses with Liger's call signatures."""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.functional import grpo_loss


def items_per_process(
    num_items_in_batch: int | float | torch.Tensor | None, mask: torch.Tensor | None, tokens: torch.Tensor
) -> torch.Tensor | float:
    """The items of the whole batch, by default the valid tokens of all processes, divided by the processes."""
    import torch.distributed as dist

    processes = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if num_items_in_batch is not None:
        return num_items_in_batch / processes
    valid = (torch.ones_like(tokens) if mask is None else mask != 0).sum().to(torch.float32)
    if processes > 1:
        dist.all_reduce(valid)
    return valid / processes


def triton_grpo_loss(
    logits: torch.Tensor,
    old_logp: torch.Tensor | None,
    ref_logp: torch.Tensor | None,
    completion_ids: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None = None,
    temperature: float = 0.9,
    beta: float = 0.04,
    eps_low: float = 0.2,
    eps_high: float = 0.4,
    inplace: bool = False,
    loss_type: str = "dapo",
    max_completion_length: int | None = None,
    importance_sampling_level: str = "token",
    reduce: bool = False,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vllm_is_ratio: torch.Tensor | None = None,
    delta: float | None = None,
    use_bias_correction_kl: bool = False,
    num_items_in_batch: int | float | torch.Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Any:
    """[`liger_trainer.functional.grpo_loss`] with Liger's arguments and results.

    Unlike there, `inplace` is False by default: the caller's logits are not overwritten. "luspo" sums the losses of a
    sequence whatever its padding.

    Args:
        logits: (batch, tokens + 1, vocab).
        old_logp: (batch, tokens), or None.
        ref_logp: (batch, tokens), or None without `beta`.
        completion_ids: (batch, tokens).
        advantages: (batch,).
        completion_mask: (batch, tokens), or None.
        temperature: Divides the logits.
        beta: Factor of the KL penalty.
        eps_low: Lower clipping distance.
        eps_high: Upper clipping distance.
        inplace: Lets the backward write over the logits.
        loss_type: Which loss.
        max_completion_length: Length that "dr_grpo" divides by.
        importance_sampling_level: "token" or "sequence".
        reduce: Whether the loss is reduced.
        sapo_temperature_pos: Temperature of "sapo" for positive advantages.
        sapo_temperature_neg: For the others.
        vllm_is_ratio: (batch,), (batch, 1) or (batch, tokens).
        delta: Upper bound of an unclipped ratio.
        use_bias_correction_kl: Multiplies the KL penalty by the ratio.
        num_items_in_batch: Tokens of the whole batch, over all processes.
        vespo_k_pos: Shape of "vespo" for advantages of at least 0.
        vespo_lambda_pos: Rate for these.
        vespo_k_neg: Shape for the others.
        vespo_lambda_neg: Rate for the others.

    Returns:
        With `reduce` the loss and a list of the mean KL, if there is a `beta`, and the clipped share; else the losses,
        KLs (or None) and clipped marks of all tokens.

    Raises:
        ValueError: for a shape or option that is not allowed.
    """
    items = None
    if reduce and loss_type in ("dapo", "cispo", "vespo"):
        items = items_per_process(num_items_in_batch, completion_mask, completion_ids)
    result = grpo_loss(
        *(logits, completion_ids, advantages, completion_mask, old_logp, ref_logp, temperature, inplace),
        *(loss_type, importance_sampling_level, eps_low, eps_high, delta, beta, use_bias_correction_kl),
        *(vllm_is_ratio, sapo_temperature_pos, sapo_temperature_neg),
        *(vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        *(max_completion_length, items, "mean" if reduce else "none"),
    )
    if not reduce:
        return result.loss, result.kl, result.clipped
    return result.loss, [metric for metric in (result.kl, result.clipped) if metric is not None]
