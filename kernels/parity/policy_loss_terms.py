"""What policy losses are made of besides ratios of probabilities: their options, and weights without a gradient."""

from __future__ import annotations

import math

import torch

PPO_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo")
LOSS_TYPES = (*PPO_TYPES, "cispo", "sapo", "vespo")


def check_policy_options(
    loss_type: str, level: str, delta: float | None, sapo_temperature_pos: float, sapo_temperature_neg: float
) -> None:
    """Raises ValueError for an option that is not allowed or does not fit the loss type."""
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"`loss_type` is {loss_type!r}; it must be one of {', '.join(map(repr, LOSS_TYPES))}.")
    if level not in ("token", "sequence"):
        raise ValueError(f"`importance_sampling_level` is {level!r}; it must be 'token' or 'sequence'.")
    if loss_type not in PPO_TYPES and level == "sequence":
        raise ValueError(f"loss_type={loss_type!r} has no importance_sampling_level='sequence'; use 'token'.")
    if loss_type not in PPO_TYPES and delta is not None:
        raise ValueError(f"loss_type={loss_type!r} does not clip on two sides; leave `delta` at None.")
    if delta is not None and not delta > 0.0:
        raise ValueError(f"`delta` is {delta}; it bounds a ratio, so it must be above 0, or None.")
    if not (sapo_temperature_pos > 0.0 and sapo_temperature_neg > 0.0):
        raise ValueError(
            f"SAPO's temperatures are {sapo_temperature_pos}, {sapo_temperature_neg}; both must be above 0."
        )


def by_sign(condition: torch.Tensor, yes: float, no: float, dtype: torch.dtype) -> torch.Tensor:
    """`yes` where `condition` holds, `no` elsewhere."""
    return torch.full_like(condition, no, dtype=dtype).masked_fill(condition, yes)


@torch.no_grad()
def gamma_weights(
    log_ratio: torch.Tensor,
    advantages: torch.Tensor,
    sampling_ratio: torch.Tensor | None,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> torch.Tensor:
    """VESPO's weight of a sequence, phi(W) = exp(lambda) * W**k * exp(-lambda * W), (B, 1)."""
    lowest, highest = math.log(1e-8), 20.0
    log_w = log_ratio.clamp(-highest, highest).sum(-1, keepdim=True)
    if sampling_ratio is not None:
        log_w = log_w + sampling_ratio.log().clamp(lowest, highest).sum(-1, keepdim=True)
    log_w = log_w.clamp(lowest, highest)
    shape, rate = (by_sign(advantages >= 0, *pair, log_w.dtype) for pair in zip(positive, negative))
    rate = rate.clamp(min=1e-4)
    return (rate + shape * log_w - rate * log_w.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def token_weights(
    mask: torch.Tensor,
    loss_type: str,
    max_completion_length: int | None,
    num_items: int | float | torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What the token losses of a batch, `(B, L)` and 0 where masked, are multiplied by in its loss: `(B, 1)` or 0-d."""
    batch, length = mask.shape
    one = torch.ones((), dtype=dtype, device=mask.device)
    if loss_type in ("grpo", "sapo"):
        return one / (mask.sum(-1, keepdim=True).clamp(min=1) * max(batch, 1))
    if loss_type == "luspo":
        return one / max(batch, 1)
    if loss_type == "dr_grpo":
        return one / max(batch * (max_completion_length or length), 1)
    if loss_type == "bnpo" or num_items is None:
        return one / mask.sum().clamp(min=1)
    # A 0-d CPU tensor enters a device operation by value, without a copy that would wait.
    return one / (num_items.clamp(min=1) if isinstance(num_items, torch.Tensor) else max(num_items, 1))
