"""Cross entropy and linear cross entropy in plain torch, differentiable by torch's own autograd.

These are what the kernels are tested against, and what `cross_entropy` runs where Triton does not; the formula is in
`cross_entropy_options`. `linear_cross_entropy`, chunked on every device, takes `row_statistics_torch_` there instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
    **options: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """`linear_cross_entropy` in plain torch: all logits at once, then `cross_entropy_reference` with its `options`."""
    return cross_entropy_reference(torch.nn.functional.linear(hidden, weight, bias), target, **options)


def row_statistics_torch_(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: RowStats,
    options: RowOptions,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    coefficient: torch.Tensor | None,
) -> None:
    """The row kernel's two passes (`cross_entropy_rows`) in plain torch, for devices without Triton and for float64.

    It fills `stats`, and with a `coefficient` overwrites `logits` with their gradient times it.
    """
    vocab_size = logits.shape[-1]
    x = logits.reshape(-1, vocab_size).to(compute_dtype(logits))
    x = x if bias is None else x + bias
    valid = target != options.ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    label = torch.where(in_range, target, 0).long()
    index = label.unsqueeze(-1)
    z, slope = x * options.logit_scale, None
    if options.softcap is not None:
        tanh = torch.tanh(z / options.softcap)
        z, slope = tanh * options.softcap, 1.0 - tanh.square()
    z = z / options.temperature
    label_z = torch.where(in_range, z.gather(-1, index).squeeze(-1), math.nan)
    # As in the kernel the label is left out of the sum: nll = softplus(rest - label_z), p[t] - 1 = -sigmoid of that.
    rest = z.scatter(-1, index, -math.inf).logsumexp(-1)
    lse = torch.logaddexp(rest, label_z)
    nll = torch.nn.functional.softplus(rest - label_z, threshold=50.0)
    log_probs = z - lse.unsqueeze(-1)
    smoothing = options.label_smoothing
    hard = 1.0 - smoothing if class_weights is None else (1.0 - smoothing) * class_weights[label]
    weights = 1.0 if class_weights is None else class_weights
    weight_sum = vocab_size if class_weights is None else class_weights.sum()
    loss = hard * nll + options.z_loss * lse.square()
    if smoothing > 0.0:
        loss = loss - smoothing / vocab_size * (log_probs * weights).sum(-1)
    for field, value in ((stats.loss, loss), (stats.nll, nll), (stats.lse, lse)):
        field.copy_(torch.where(valid, value, 0.0))
    if stats.entropy.numel():
        stats.entropy.copy_(torch.where(valid, torch.special.entr(log_probs.exp()).sum(-1), 0.0))
    if stats.predicted.numel():
        stats.predicted.copy_(torch.where(valid, z.argmax(-1), -1))
    if coefficient is None:
        return
    spread = 2.0 * options.z_loss * lse
    if smoothing > 0.0:
        spread = spread + smoothing / vocab_size * weight_sum
    label_error = -torch.sigmoid(rest - label_z)
    gradient = log_probs.exp() * (hard + spread).unsqueeze(-1)
    gradient.scatter_(-1, index, (hard * label_error + spread * (label_error + 1.0)).unsqueeze(-1))
    if smoothing > 0.0:
        gradient -= smoothing / vocab_size * weights
    gradient *= (coefficient * (options.logit_scale / options.temperature)).expand(target.shape).unsqueeze(-1)
    if slope is not None:
        gradient *= slope
    logits.copy_(gradient.masked_fill_(~valid.unsqueeze(-1), 0.0).view(logits.shape))
