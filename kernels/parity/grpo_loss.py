"""Policy losses of the GRPO family, from log-probabilities or from logits.

With l the log-probability of a token under the policy, o and r those under the old and the reference policy, A the
advantage of its sequence and w = exp(l - o), or for sequence-level importance exp of its mean over the sequence:

    grpo, dapo, bnpo, dr_grpo, luspo   -min(min(w, delta) * A, clip(w, 1 - epsilon_low, 1 + epsilon_high) * A)
    cispo                              -stop_gradient(min(w, epsilon_high)) * A * l                     arXiv 2506.13585
    sapo                               -sigmoid(t * (w - 1)) * 4 / t * A, t by the sign of A            arXiv 2511.20347
    vespo                              -stop_gradient(phi(W)) * A * l, W the ratio of the whole sequence
    all, with beta                     + beta * (exp(r - l) - (r - l) - 1)

The logits matter only through l, whose kernel and backward are those of `cross_entropy`; everything after it is O(N),
in plain torch, and works as well on the log-probabilities of `linear_log_probs`, which need no logits in memory.

Bytes moved for (N, V) logits of b bytes: N*V*b forward, 2*N*V*b backward, and a few fp32 numbers a token.
"""

from __future__ import annotations

import dataclasses

import torch

from liger_trainer.kernels.head.cross_entropy import cross_entropy
from liger_trainer.kernels.parity.policy_loss_terms import by_sign, check_policy_options, gamma_weights, token_weights

_IGNORE = -100


@dataclasses.dataclass
class GRPOLossOutput:
    """A policy loss with its metrics; only `loss` carries a gradient.

    Attributes:
        loss: fp32, 0-d, or `(B, L)` with reduction "none".
        kl: Mean of the KL penalty over the valid tokens, or with reduction "none" that of each; None without `beta`.
        clipped: Share of the valid tokens whose ratio is clipped, or with reduction "none" 1 or 0 for each.
        log_probs: `(B, L)` fp32, 0 at masked tokens.
    """

    loss: torch.Tensor
    kl: torch.Tensor | None
    clipped: torch.Tensor
    log_probs: torch.Tensor


def grpo_loss_from_log_probs(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    sampling_ratio: torch.Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    max_completion_length: int | None = None,
    num_items: int | float | torch.Tensor | None = None,
    reduction: str = "mean",
) -> GRPOLossOutput:
    """The loss of a policy from the log-probabilities of its tokens, such as those of `linear_log_probs`.

    Args:
        log_probs: `(B, L)`, differentiated.
        advantages: `(B,)` or `(B, 1)`, of the sequences; `(B, L)` of the tokens.
        completion_mask: `(B, L)`, 0 where a token does not count, whatever the other tensors hold there.
        old_log_probs: `(B, L)`, of the policy that the tokens were sampled for; by default the policy itself.
        ref_log_probs: `(B, L)`, of the reference policy; needed with `beta`.
        loss_type: "grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo" or "vespo".
        importance_sampling_level: "token", or "sequence" for the clipped losses: GSPO's ratio, arXiv 2507.18071.
        epsilon_low: Lower clipping distance.
        epsilon_high: Upper clipping distance; for "cispo" the upper bound itself.
        delta: Upper bound of an unclipped ratio, for the clipped losses.
        beta: Factor of the KL penalty.
        use_bias_correction_kl: Multiplies the KL penalty by the ratio.
        sampling_ratio: `(B,)`, `(B, 1)` or `(B, L)`, corrects for a sampler that was not the old policy.
        sapo_temperature_pos: Temperature of "sapo" for positive advantages, more than 0.
        sapo_temperature_neg: For the others.
        vespo_k_pos: Shape of "vespo" for advantages of at least 0.
        vespo_lambda_pos: Rate for these.
        vespo_k_neg: Shape for the others.
        vespo_lambda_neg: Rate for the others.
        max_completion_length: Length that "dr_grpo" divides by; by default L.
        num_items: Divides the sum of "dapo", "cispo" and "vespo", as a number or a 0-d tensor; by default the valid
            tokens. The number of a whole batch over several processes belongs here divided by theirs.
        reduction: "mean" reduces as `loss_type` says; "none" returns the token losses.

    Returns:
        A `GRPOLossOutput`.

    Raises:
        ValueError: For an option that is not allowed or does not fit the loss type.
    """
    check_policy_options(loss_type, importance_sampling_level, delta, sapo_temperature_pos, sapo_temperature_neg)
    if reduction not in ("mean", "none"):
        raise ValueError(f"`reduction` is {reduction!r}; it must be 'mean' or 'none'.")
    if beta != 0.0 and ref_log_probs is None:
        raise ValueError(f"`beta` is {beta}, which needs `ref_log_probs`; give them, or beta=0.0.")
    mask = torch.ones_like(log_probs, dtype=torch.bool) if completion_mask is None else completion_mask != 0
    advantages = (advantages.unsqueeze(-1) if advantages.dim() == 1 else advantages).to(log_probs.dtype)
    if advantages.shape == mask.shape:
        advantages = torch.where(mask, advantages, 0.0)
    if sampling_ratio is not None:
        sampling_ratio = sampling_ratio.unsqueeze(-1) if sampling_ratio.dim() == 1 else sampling_ratio
        if sampling_ratio.shape == mask.shape:
            sampling_ratio = torch.where(mask, sampling_ratio, 1.0)
    log_probs = torch.where(mask, log_probs, 0.0)
    old = log_probs.detach() if old_log_probs is None else old_log_probs
    log_ratio = torch.where(mask, log_probs - old, 0.0)
    if importance_sampling_level == "sequence":
        ratio = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
    else:
        ratio = log_ratio.exp()
    clipped = torch.zeros_like(mask)
    if loss_type == "cispo":
        losses = -ratio.clamp(max=epsilon_high).detach() * advantages * log_probs
        clipped = (ratio > epsilon_high) & (advantages > 0)
    elif loss_type == "sapo":
        temperature = by_sign(advantages > 0, sapo_temperature_pos, sapo_temperature_neg, ratio.dtype)
        losses = -torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature * advantages
    elif loss_type == "vespo":
        positive, negative = (vespo_k_pos, vespo_lambda_pos), (vespo_k_neg, vespo_lambda_neg)
        losses = -gamma_weights(log_ratio, advantages, sampling_ratio, positive, negative) * advantages * log_probs
    else:
        low, high = 1.0 - epsilon_low, 1.0 + epsilon_high
        free = ratio if delta is None else ratio.clamp(max=delta)
        losses = -torch.minimum(free * advantages, ratio.clamp(low, high) * advantages)
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    if sampling_ratio is not None and loss_type != "vespo":
        losses = losses * sampling_ratio
    kl = None
    if beta != 0.0 and ref_log_probs is not None:
        distance = torch.where(mask, ref_log_probs - log_probs, 0.0)
        kl = torch.expm1(distance) - distance
        kl = kl * ratio if use_bias_correction_kl else kl
        losses = losses + beta * kl
        kl = torch.where(mask, kl.detach(), 0.0)
    losses = torch.where(mask, losses, 0.0)
    clipped = (clipped & mask).to(losses.dtype)
    if reduction == "none":
        return GRPOLossOutput(losses, kl, clipped, log_probs.detach())
    valid = mask.sum().clamp(min=1)
    loss = (losses * token_weights(mask, loss_type, max_completion_length, num_items, losses.dtype)).sum()
    return GRPOLossOutput(loss, None if kl is None else kl.sum() / valid, clipped.sum() / valid, log_probs.detach())


def grpo_loss(
    logits: torch.Tensor,
    completion_ids: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None = None,
    old_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = False,
    sampling_ratio: torch.Tensor | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    max_completion_length: int | None = None,
    num_items: int | float | torch.Tensor | None = None,
    reduction: str = "mean",
) -> GRPOLossOutput:
    """The loss of a policy from its logits; without logits in memory, `linear_log_probs` gives the same.

    Args:
        logits: `(B, L, V)`, or `(B, L + 1, V)` as a model gives them for L completion tokens after a prompt token: the
            last position, which predicts what comes after the completion, then gets no gradient.
        completion_ids: `(B, L)` of int64 or int32.
        advantages: `(B,)`, `(B, 1)` or `(B, L)`.
        completion_mask: `(B, L)`, 0 where a token does not count; its logits are not read.
        old_log_probs: `(B, L)`, at the same temperature; by default the policy itself.
        ref_log_probs: `(B, L)`, at the same temperature; needed with `beta`.
        temperature: Divides the logits, more than 0.
        inplace_backward: Lets the backward write the gradient over `logits`, as for `cross_entropy`.
        loss_type: As for `grpo_loss_from_log_probs`, like everything below.
        importance_sampling_level: "token" or "sequence".
        epsilon_low: Lower clipping distance.
        epsilon_high: Upper clipping distance; for "cispo" the upper bound itself.
        delta: Upper bound of an unclipped ratio.
        beta: Factor of the KL penalty.
        use_bias_correction_kl: Multiplies the KL penalty by the ratio.
        sampling_ratio: Corrects for a sampler that was not the old policy.
        sapo_temperature_pos: Temperature of "sapo" for positive advantages.
        sapo_temperature_neg: For the others.
        vespo_k_pos: Shape of "vespo" for advantages of at least 0.
        vespo_lambda_pos: Rate for these.
        vespo_k_neg: Shape for the others.
        vespo_lambda_neg: Rate for the others.
        max_completion_length: Length that "dr_grpo" divides by.
        num_items: Divides the sum of "dapo", "cispo" and "vespo".
        reduction: "mean" or "none".

    Returns:
        A `GRPOLossOutput`.

    Raises:
        ValueError: For a shape, dtype, device or option that is not allowed.
    """
    if logits.dim() != 3 or completion_ids.dim() != 2 or logits.shape[0] != completion_ids.shape[0]:
        raise ValueError(
            f"`logits` has shape {tuple(logits.shape)} and `completion_ids` {tuple(completion_ids.shape)}; "
            "they must be (B, L, V) or (B, L + 1, V), and (B, L)."
        )
    length = completion_ids.shape[1]
    if logits.shape[1] not in (length, length + 1):
        raise ValueError(
            f"`logits` has {logits.shape[1]} positions for completions of {length} tokens; "
            f"give {length} or {length + 1}."
        )
    labels = completion_ids if completion_mask is None else torch.where(completion_mask != 0, completion_ids, _IGNORE)
    # An ignored last position costs nothing, where slicing it off would copy the whole gradient.
    labels = torch.nn.functional.pad(labels, (0, logits.shape[1] - length), value=_IGNORE)
    nll = cross_entropy(logits, labels, _IGNORE, "none", temperature=temperature, inplace=inplace_backward)
    assert isinstance(nll, torch.Tensor)
    return grpo_loss_from_log_probs(
        -nll[:, :length],
        advantages,
        completion_mask,
        old_log_probs,
        ref_log_probs,
        loss_type,
        importance_sampling_level,
        epsilon_low,
        epsilon_high,
        delta,
        beta,
        use_bias_correction_kl,
        sampling_ratio,
        sapo_temperature_pos,
        sapo_temperature_neg,
        vespo_k_pos,
        vespo_lambda_pos,
        vespo_k_neg,
        vespo_lambda_neg,
        max_completion_length,
        num_items,
        reduction,
    )
