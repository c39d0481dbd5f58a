"""Cross entropy and linear cross entropy in plain torch, differentiable by torch's own autograd.

These are what the kernels are tested against, and what `cross_entropy` runs where Triton does not; the formula is in
`_cross_entropy_options`. `linear_cross_entropy`, chunked on every device, takes `row_statistics_torch_` there instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.head.cross_entropy_options import (
    CrossEntropyOutput,
    ExtraStats,
    RowOptions,
    RowPartials,
    RowStats,
    Shard,
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
    average = reduction == "mean" and num_items is None
    class_weights = checked_class_weights(class_weights, vocab_size, logits, target, ignore_index, average)
    stats = _row_statistics(logits.reshape(-1, vocab_size), target.reshape(-1), options, class_weights)
    if reduction == "none":
        return with_outputs(stats.loss.view(target.shape), outputs, stats, target, options, None)
    scale = inverse_normalizer(target, ignore_index, reduction, num_items, compute_dtype(logits))
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


def _transformed_rows(
    logits: torch.Tensor, options: RowOptions, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The transformed logits z as `(N, V)` of the computing dtype, and the slope of the soft-cap, if there is one."""
    x = logits.reshape(-1, logits.shape[-1]).to(compute_dtype(logits))
    z = (x if bias is None else x + bias) * options.logit_scale
    if options.softcap is None:
        return z / options.temperature, None
    tanh = torch.tanh(z / options.softcap)
    return tanh * options.softcap / options.temperature, 1.0 - tanh.square()


def _labels_of(target: torch.Tensor, columns: int, vocab_start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each label, 0 where it is none of `columns`, and whether it is one."""
    label = target.long() - vocab_start
    here = (label >= 0) & (label < columns)
    return torch.where(here, label, 0).unsqueeze(-1), here


def row_statistics_torch_(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: RowStats,
    options: RowOptions,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    coefficient: torch.Tensor | None,
    extra: ExtraStats | None = None,
) -> None:
    """The row kernel's two passes (`_cross_entropy_rows`) in plain torch, for devices without Triton and for float64.

    It fills `stats` and `extra`, and with a `coefficient` overwrites `logits` with their gradient times it.
    """
    vocab_size = logits.shape[-1]
    valid = target != options.ignore_index
    index, in_range = _labels_of(target, vocab_size)
    z, _ = _transformed_rows(logits, options, bias)
    label_z = torch.where(in_range, z.gather(-1, index).squeeze(-1), math.nan)
    # As in the kernel the label is left out of the sum: nll = softplus(rest - label_z).
    rest = z.scatter(-1, index, -math.inf).logsumexp(-1)
    lse = torch.logaddexp(rest, label_z)
    nll = torch.nn.functional.softplus(rest - label_z, threshold=50.0)
    log_probs = z - lse.unsqueeze(-1)
    smoothing = options.label_smoothing
    weights = 1.0 if class_weights is None else class_weights
    hard = 1.0 - smoothing if class_weights is None else (1.0 - smoothing) * class_weights[index.squeeze(-1)]
    loss = hard * nll + options.z_loss * lse.square()
    if smoothing > 0.0:
        loss = loss - smoothing / vocab_size * (log_probs * weights).sum(-1)
    fields = [(stats.loss, loss), (stats.nll, nll), (stats.lse, lse)]
    if stats.entropy.numel():
        fields.append((stats.entropy, torch.special.entr(log_probs.exp()).sum(-1)))
    if extra is not None and extra.mean_logit.numel():
        fields.append((extra.mean_logit, z.mean(-1)))
    if extra is not None and extra.sum_squared_probs.numel():
        fields.append((extra.sum_squared_probs, (2.0 * log_probs).logsumexp(-1)))
    for field, value in fields:
        field.copy_(torch.where(valid, value, 0.0))
    if stats.predicted.numel():
        stats.predicted.copy_(torch.where(valid, z.argmax(-1), -1))
    if coefficient is not None:
        row_gradient_torch_(logits, target, stats, options, bias, class_weights, coefficient, None, None)


def row_gradient_torch_(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: RowStats,
    options: RowOptions,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    coefficient: torch.Tensor,
    entropy_coefficient: torch.Tensor | None,
    shard: Shard | None,
) -> None:
    """The row kernel's second pass in plain torch: `row_gradient_` over `logits`."""
    columns = logits.shape[-1]
    vocab_start, vocab_size = (0, columns) if shard is None else shard
    valid = target != options.ignore_index
    index, here = _labels_of(target, columns, vocab_start)
    z, slope = _transformed_rows(logits, options, bias)
    log_probs = z - stats.lse.unsqueeze(-1)
    smoothing = options.label_smoothing
    weights = 1.0 if class_weights is None else class_weights
    weight_sum = vocab_size if class_weights is None else class_weights.sum()
    hard = 1.0 - smoothing if class_weights is None else (1.0 - smoothing) * class_weights[index.squeeze(-1)]
    spread = 2.0 * options.z_loss * stats.lse
    if smoothing > 0.0:
        spread = spread + smoothing / vocab_size * weight_sum
    label_error = torch.expm1(-stats.nll)  # p[t] - 1
    gradient = log_probs.exp()
    at_label = torch.where(here, hard * label_error + spread * (label_error + 1.0), gradient[:, 0] * (hard + spread))
    gradient = (gradient * (hard + spread).unsqueeze(-1)).scatter_(-1, index, at_label.unsqueeze(-1))
    if smoothing > 0.0:
        gradient -= smoothing / vocab_size * weights
    gradient *= coefficient.expand(target.shape).unsqueeze(-1)
    if entropy_coefficient is not None:
        surprise = log_probs.clamp(min=torch.finfo(z.dtype).min) + stats.entropy.unsqueeze(-1)
        gradient -= entropy_coefficient.unsqueeze(-1) * log_probs.exp() * surprise
    gradient *= options.logit_scale / options.temperature
    if slope is not None:
        gradient *= slope
    logits.copy_(gradient.masked_fill_(~valid.unsqueeze(-1), 0.0).view(logits.shape))


def row_partials_torch_(
    logits: torch.Tensor,
    target: torch.Tensor,
    partials: torch.Tensor,
    options: RowOptions,
    shard: Shard,
    bias: torch.Tensor | None,
) -> None:
    """The row kernel's first pass over a shard in plain torch: `row_partials_`."""
    index, here = _labels_of(target, logits.shape[-1], shard.vocab_start)
    z, _ = _transformed_rows(logits, options, bias)
    rest_z = torch.where(here.unsqueeze(-1), z.scatter(-1, index, -math.inf), z)
    rest = rest_z.logsumexp(-1)
    mean = ((rest_z - rest.unsqueeze(-1)).exp() * z.clamp(min=torch.finfo(z.dtype).min)).sum(-1)
    best, best_id = z.max(-1).values, z.argmax(-1) + shard.vocab_start
    fields = RowPartials(
        rest,
        torch.where(rest.isneginf(), 0.0, mean),
        (2.0 * rest_z).logsumexp(-1),
        torch.where(here, z.gather(-1, index).squeeze(-1), 0.0),
        here.to(z.dtype),
        z.sum(-1),
        best,
        best_id.to(z.dtype),
    )
    valid = (target != options.ignore_index).unsqueeze(-1)
    partials.copy_(torch.where(valid, torch.stack(tuple(fields), -1), 0.0))
