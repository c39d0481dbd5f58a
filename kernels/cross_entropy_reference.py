"""Cross entropy and linear cross entropy in plain torch, differentiable by torch's own autograd.

These are what the kernels are tested against, and what `cross_entropy` runs where Triton does not. The formula is in
`cross_entropy_options`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from liger_trainer.kernels.cross_entropy_options import (
    CrossEntropyOutput,
    RowOptions,
    RowStats,
    checked_class_weights,
    compute_dtype,
    inverse_normalizer,
    with_outputs,
)


def transformed_logits(x: torch.Tensor, options: RowOptions) -> torch.Tensor:
    """``softcap * tanh(x * logit_scale / softcap) / temperature``, or ``x * logit_scale / temperature`` uncapped."""
    z = x * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    return z / options.temperature


def _row_statistics(
    logits: torch.Tensor, target: torch.Tensor, options: RowOptions, class_weights: torch.Tensor | None
) -> RowStats:
    """Every statistic of `(N, V)` logits; an ignored row gives 0 and no gradient whatever it holds."""
    vocab_size = logits.shape[-1]
    valid = target != options.ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    label = torch.where(in_range, target, 0).unsqueeze(-1).long()
    z = transformed_logits(logits.to(compute_dtype(logits)).masked_fill(~valid.unsqueeze(-1), 0.0), options)
    log_probs = torch.log_softmax(z, dim=-1)
    nll = -log_probs.gather(-1, label).squeeze(-1)
    nll = torch.where(in_range, nll, math.nan)
    lse = torch.logsumexp(z, dim=-1)
    weights = 1.0 if class_weights is None else class_weights
    label_weight = 1.0 if class_weights is None else class_weights[label.squeeze(-1)]
    loss = (1.0 - options.label_smoothing) * label_weight * nll
    if options.label_smoothing > 0.0:
        loss = loss - options.label_smoothing / vocab_size * (log_probs * weights).sum(-1)
    if options.z_loss != 0.0:
        loss = loss + options.z_loss * lse.square()
    with torch.no_grad():
        entropy = torch.special.entr(log_probs.exp()).sum(-1)
        predicted = torch.where(valid, z.argmax(-1), -1)
    loss, nll, lse, entropy = (torch.where(valid, row, 0.0) for row in (loss, nll, lse, entropy))
    return RowStats(loss, nll.detach(), lse.detach(), entropy, predicted)


def cross_entropy_reference(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    class_weights: torch.Tensor | None = None,
    outputs: Sequence[str] = (),
) -> torch.Tensor | CrossEntropyOutput:
    """`cross_entropy` in plain torch, computed in fp32 (float64 for float64 logits); it has the same arguments."""
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    vocab_size = logits.shape[-1]
    class_weights = checked_class_weights(class_weights, vocab_size, logits)
    stats = _row_statistics(logits.reshape(-1, vocab_size), target.reshape(-1), options, class_weights)
    if reduction == "none":
        return with_outputs(stats.loss.view(target.shape), outputs, stats, target, options, None)
    scale = inverse_normalizer(
        target, vocab_size, ignore_index, reduction, num_items, class_weights, compute_dtype(logits)
    )
    return with_outputs(stats.loss.sum() * scale, outputs, stats, target, options, scale)


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    class_weights: torch.Tensor | None = None,
    outputs: Sequence[str] = (),
) -> torch.Tensor | CrossEntropyOutput:
    """`linear_cross_entropy` in plain torch: all logits at once, then `cross_entropy_reference`."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    return cross_entropy_reference(
        logits,
        target,
        ignore_index,
        reduction,
        num_items,
        label_smoothing,
        z_loss,
        softcap,
        logit_scale,
        temperature,
        class_weights,
        outputs,
    )
