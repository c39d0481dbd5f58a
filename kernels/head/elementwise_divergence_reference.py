"""KL divergence, JSD and TVD of given distributions in plain torch (formulas: `elementwise_divergence`)."""

from __future__ import annotations

import math

import torch

from liger_trainer.kernels.head.cross_entropy_options import compute_dtype, inverse_normalizer

_FLOOR = -1.0e30  # stands for a log-probability of minus infinity


def _infinite(log_probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Infinity where a class of some weight has probability 0 in the other distribution."""
    return torch.where((log_probs.detach() == -math.inf) & (weights.detach() > 0), math.inf, 0.0)


def elements_reference(
    x: torch.Tensor,
    y: torch.Tensor,
    labels: torch.Tensor | None,
    divergence: str,
    beta: float,
    eps: float,
    ignore_index: int,
) -> torch.Tensor:
    """The summands `(N, V)`, in fp32 (float64 for float64 `x`), differentiable in `x`."""
    vocab_size, dtype = x.shape[-1], compute_dtype(x)
    x = x.reshape(-1, vocab_size).to(dtype)
    y = y.detach().reshape(-1, vocab_size).to(dtype)
    ignored = None if labels is None else (labels == ignore_index).unsqueeze(-1)
    if ignored is not None:
        x, y = x.masked_fill(ignored, 0.0), y.masked_fill(ignored, 0.0)
    if divergence == "tvd":
        values = 0.5 * (x - y).abs()
    elif divergence == "kl":
        values = y * (y.clamp(min=eps).log() - x.clamp(min=_FLOOR)) + _infinite(x, y)
    else:
        floor_x, floor_y = x.clamp(min=_FLOOR), y.clamp(min=_FLOOR)
        if divergence in ("kl_log", "forward_kl"):
            values = y.exp() * (floor_y - floor_x) + _infinite(x, y.exp())
        elif divergence == "reverse_kl":
            values = floor_x.exp() * (floor_x - floor_y) + _infinite(y, x.exp())
        else:
            log_m = torch.logaddexp(floor_y + math.log(beta), floor_x + math.log1p(-beta))
            values = beta * y.exp() * (floor_y - log_m) + (1.0 - beta) * floor_x.exp() * (floor_x - log_m)
    return values if ignored is None else values.masked_fill(ignored, 0.0)


def row_scale(x: torch.Tensor, labels: torch.Tensor | None, reduction: str, ignore_index: int) -> torch.Tensor:
    """What the sum of the divergences of the rows of `x` is multiplied by for `reduction`, 0-d on its device."""
    num_items = x.numel() // x.shape[-1] if labels is None and reduction != "sum" else None
    counted = x if labels is None else labels
    name = "sum" if reduction == "sum" else "mean"
    scale = inverse_normalizer(counted, ignore_index, name, num_items, compute_dtype(x))
    return scale / x.shape[-1] if reduction == "mean" else scale
