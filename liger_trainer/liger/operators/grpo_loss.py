"""Policy losses of the GRPO family, from log-probabilities or from logits.

With l, o and r the log-probabilities of a token under the policy, the old policy and the reference policy, A the
advantage of its sequence, and w = exp(l - o) (for sequence-level importance, exp of the mean of l - o over the
sequence):

    grpo, dapo, bnpo, dr_grpo, luspo   -min(min(w, delta) * A, clip(w, 1 - epsilon_low, 1 + epsilon_high) * A)
    cispo                              -stop_gradient(min(w, epsilon_high)) * A * l                     arXiv 2506.13585
    sapo                               -sigmoid(t * (w - 1)) * 4 / t * A, t by the sign of A            arXiv 2511.20347
    vespo                              -stop_gradient(phi(W)) * A * l, W the ratio of the whole sequence
    all, with beta                     + beta * (exp(r - l) - (r - l) - 1)

The logits enter only through l, which comes from `cross_entropy` with its kernel and backward. The rest is O(N) plain
torch and also takes the log-probabilities of `linear_log_probs`, which needs no logits in memory.

Bytes moved for (N, V) logits of b bytes: N*V*b forward, 2*N*V*b backward, and a few fp32 values per token.

Shapes: B completions, L tokens of each, V vocabulary; logits (B, L + 1, V), token values (B, L), advantages (B,).
"""

from __future__ import annotations

import dataclasses
import math

import torch

from liger_trainer.configs.loss_types import POLICY_LOSS_TYPES
from liger_trainer.kernels.head.cross_entropy import cross_entropy
from liger_trainer.kernels.head.loss_options import IGNORE_INDEX


@dataclasses.dataclass(frozen=True)
class PolicyOptions:
    """The options of a policy loss; `grpo_loss_from_log_probs` describes them.

    Raises:
        ValueError: For an option that is not allowed or does not fit the loss type.
    """

    loss_type: str
    importance_sampling_level: str
    epsilon_low: float
    epsilon_high: float
    delta: float | None
    beta: float
    use_bias_correction_kl: bool
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
    max_completion_length: int | None

    def __post_init__(self) -> None:
        loss_type, delta = self.loss_type, self.delta
        temperatures = (self.sapo_temperature_pos, self.sapo_temperature_neg)
        if loss_type not in POLICY_LOSS_TYPES:
            known = ", ".join(map(repr, POLICY_LOSS_TYPES))
            raise ValueError(f"`loss_type` is {loss_type!r}; it must be one of {known}.")
        clips_ratio = POLICY_LOSS_TYPES[loss_type].clips_ratio
        if self.importance_sampling_level not in ("token", "sequence"):
            level = self.importance_sampling_level
            raise ValueError(f"`importance_sampling_level` is {level!r}; it must be 'token' or 'sequence'.")
        if not clips_ratio and self.importance_sampling_level == "sequence":
            raise ValueError(f"loss_type={loss_type!r} has no importance_sampling_level='sequence'; use 'token'.")
        if not clips_ratio and delta is not None:
            raise ValueError(f"loss_type={loss_type!r} does not clip on two sides; leave `delta` at None.")
        if delta is not None and not delta > 0.0:
            raise ValueError(f"`delta` is {delta}; it bounds a ratio, so it must be above 0, or None.")
        if not all(temperature > 0.0 for temperature in temperatures):
            raise ValueError(f"SAPO's temperatures are {temperatures[0]}, {temperatures[1]}; both must be above 0.")


def by_sign(condition: torch.Tensor, yes: float, no: float, dtype: torch.dtype) -> torch.Tensor:
    """`yes` where `condition` holds, `no` elsewhere."""
    return torch.full_like(condition, no, dtype=dtype).masked_fill(condition, yes)


@torch.no_grad()
def gamma_weights(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    sampling_ratio: torch.Tensor | None,
    options: PolicyOptions,
) -> torch.Tensor:
    """VESPO's weight of each sequence, phi(W) = exp(lambda) * W**k * exp(-lambda * W), (B, 1), without a gradient."""
    lowest, highest = math.log(1e-8), 20.0
    log_w = log_ratio.clamp(-highest, highest).sum(-1, keepdim=True)
    if sampling_ratio is not None:
        log_w = log_w + sampling_ratio.log().clamp(lowest, highest).sum(-1, keepdim=True)
    log_w = log_w.clamp(lowest, highest)
    positive = advantages >= 0
    shape = by_sign(positive, options.vespo_k_pos, options.vespo_k_neg, log_w.dtype)
    rate = by_sign(positive, options.vespo_lambda_pos, options.vespo_lambda_neg, log_w.dtype).clamp(min=1e-4)
    return (rate + shape * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def token_weights(
    mask: torch.Tensor, options: PolicyOptions, num_items: int | float | torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The factors, `(B, 1)` or 0-d, by which token losses `(B, L)`, 0 where masked, add up to the loss of a batch."""
    batch, length = mask.shape
    one = torch.ones((), dtype=dtype, device=mask.device)
    divided_by = POLICY_LOSS_TYPES[options.loss_type].divided_by
    if divided_by == "completion":
        return one / (mask.sum(-1, keepdim=True).clamp(min=1) * max(batch, 1))
    if divided_by == "completions":
        return one / max(batch, 1)
    if divided_by == "longest completion":
        return one / max(batch * (options.max_completion_length or length), 1)
    if divided_by == "micro-batch" or num_items is None:
        return one / mask.sum().clamp(min=1)
    # A 0-d CPU tensor enters a device operation by value, without a copy that would synchronise.
    return one / (num_items.clamp(min=1) if isinstance(num_items, torch.Tensor) else max(num_items, 1))


@dataclasses.dataclass
class GRPOLossOutput:
    """A policy loss with its metrics; only `loss` carries a gradient.

    Attributes:
        loss: fp32, 0-d, or `(B, L)` with reduction "none".
        kl: Mean KL penalty of the valid tokens, or with reduction "none" that of each token; None without `beta`.
        clipped: Fraction of the valid tokens whose ratio is clipped, or with reduction "none" 1 or 0 for each token.
        log_probs: `(B, L)` fp32, 0 at masked tokens.
    """

    loss: torch.Tensor
    kl: torch.Tensor | None
    clipped: torch.Tensor
    log_probs: torch.Tensor


def policy_loss(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor | None,
    old_log_probs: torch.Tensor | None,
    ref_log_probs: torch.Tensor | None,
    sampling_ratio: torch.Tensor | None,
    options: PolicyOptions,
    num_items: int | float | torch.Tensor | None = None,
    reduction: str = "mean",
) -> GRPOLossOutput:
    """`grpo_loss_from_log_probs` with its options as one object."""
    loss_type, beta = options.loss_type, options.beta
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
    if options.importance_sampling_level == "sequence":
        ratio = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)).exp()
    else:
        ratio = log_ratio.exp()
    clipped = torch.zeros_like(mask)
    if loss_type == "cispo":
        losses = -ratio.clamp(max=options.epsilon_high).detach() * advantages * log_probs
        clipped = (ratio > options.epsilon_high) & (advantages > 0)
    elif loss_type == "sapo":
        temperature = by_sign(advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg, ratio.dtype)
        losses = -torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature * advantages
    elif loss_type == "vespo":
        losses = -gamma_weights(log_ratio, advantages, sampling_ratio, options) * advantages * log_probs
    else:
        low, high = 1.0 - options.epsilon_low, 1.0 + options.epsilon_high
        free = ratio if options.delta is None else ratio.clamp(max=options.delta)
        losses = -torch.minimum(free * advantages, ratio.clamp(low, high) * advantages)
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > high) & (advantages > 0))
    if sampling_ratio is not None and loss_type != "vespo":
        losses = losses * sampling_ratio
    kl = None
    if beta != 0.0 and ref_log_probs is not None:
        distance = torch.where(mask, ref_log_probs - log_probs, 0.0)
        kl = torch.expm1(distance) - distance
        kl = kl * ratio if options.use_bias_correction_kl else kl
        losses = losses + beta * kl
        kl = torch.where(mask, kl.detach(), 0.0)
    losses = torch.where(mask, losses, 0.0)
    clipped = (clipped & mask).to(losses.dtype)
    if reduction == "none":
        return GRPOLossOutput(losses, kl, clipped, log_probs.detach())
    valid = mask.sum().clamp(min=1)
    loss = (losses * token_weights(mask, options, num_items, losses.dtype)).sum()
    return GRPOLossOutput(loss, None if kl is None else kl.sum() / valid, clipped.sum() / valid, log_probs.detach())


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
        completion_mask: `(B, L)`, 0 where a token does not count, whatever the other tensors hold there; by default
            every token counts.
        old_log_probs: `(B, L)`, of the policy that sampled the tokens; by default the policy itself.
        ref_log_probs: `(B, L)`, of the reference policy; needed with `beta`.
        loss_type: "grpo", "dapo", "bnpo", "dr_grpo", "luspo", "cispo", "sapo" or "vespo".
        importance_sampling_level: "token", or "sequence" for the clipped losses: GSPO's ratio, arXiv 2507.18071.
        epsilon_low: Lower clipping distance.
        epsilon_high: Upper clipping distance; for "cispo" the upper bound itself.
        delta: Upper bound of an unclipped ratio, for the clipped losses.
        beta: Factor of the KL penalty.
        use_bias_correction_kl: Multiplies the KL penalty by the ratio.
        sampling_ratio: `(B,)`, `(B, 1)` or `(B, L)`, corrects for a sampler that differs from the old policy.
        sapo_temperature_pos: Temperature of "sapo" for positive advantages, more than 0.
        sapo_temperature_neg: Temperature of "sapo" for the other advantages, more than 0.
        vespo_k_pos: Shape k of "vespo" for advantages of at least 0.
        vespo_lambda_pos: Rate lambda of "vespo" for advantages of at least 0.
        vespo_k_neg: Shape k for negative advantages.
        vespo_lambda_neg: Rate lambda for negative advantages.
        max_completion_length: Length that "dr_grpo" divides by; by default L.
        num_items: Divides the sum of "dapo", "cispo" and "vespo", as a number or a 0-d tensor; by default the number of
            valid tokens. For a batch spread over several processes, pass its valid tokens divided by the processes.
        reduction: "mean" reduces as `loss_type` defines; "none" returns the token losses.

    Returns:
        A `GRPOLossOutput`.

    Raises:
        ValueError: For an option that is not allowed or does not fit the loss type.
    """
    options = PolicyOptions(
        *(loss_type, importance_sampling_level, epsilon_low, epsilon_high, delta, beta, use_bias_correction_kl),
        *(sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        max_completion_length,
    )
    return policy_loss(
        *(log_probs, advantages, completion_mask, old_log_probs, ref_log_probs, sampling_ratio),
        *(options, num_items, reduction),
    )


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
    """The loss of a policy from its logits.

    `grpo_loss_from_log_probs` of `linear_log_probs` gives the same without the logits in memory. The arguments are
    those of that function, with log-probabilities at the same temperature, and in place of the policy's:

    - `logits`: `(B, L, V)`, or `(B, L + 1, V)` as a model returns them for a prompt token and L completion tokens: the
      last position, which predicts the token after the completion, gets no gradient. The logits of a token that
      `completion_mask` leaves out are not read;
    - `completion_ids`: `(B, L)` of int64 or int32;
    - `temperature`: Divides the logits, more than 0;
    - `inplace_backward`: Lets the backward write the gradient over `logits`, as in `cross_entropy`.

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
    labels = completion_ids
    if completion_mask is not None:
        labels = torch.where(completion_mask != 0, labels, IGNORE_INDEX)
    # Ignoring the last position is free; slicing it off would copy the whole gradient.
    labels = torch.nn.functional.pad(labels, (0, logits.shape[1] - length), value=IGNORE_INDEX)
    nll = cross_entropy(logits, labels, IGNORE_INDEX, "none", temperature=temperature, inplace=inplace_backward)
    assert isinstance(nll, torch.Tensor)
    options = PolicyOptions(
        *(loss_type, importance_sampling_level, epsilon_low, epsilon_high, delta, beta, use_bias_correction_kl),
        *(sapo_temperature_pos, sapo_temperature_neg, vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg),
        max_completion_length,
    )
    return policy_loss(
        *(-nll[:, :length], advantages, completion_mask, old_log_probs, ref_log_probs, sampling_ratio),
        *(options, num_items, reduction),
    )
