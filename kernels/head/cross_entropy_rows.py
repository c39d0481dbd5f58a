"""Statistics and gradients of rows of logits under cross entropy, by the row kernel or in plain torch.

`cross_entropy_kernel` has the formulas and the kernel. Plain torch is for devices without Triton and for float64.

Shapes: N tokens, V vocabulary, or the columns of a shard of it; logits (N, V), or (B, S, V) of B sequences of S tokens.
"""

from __future__ import annotations

import math

import torch

from liger_trainer.kernels.head.cross_entropy_kernel import launch_rows
from liger_trainer.kernels.head.loss_options import LossOptions
from liger_trainer.kernels.head.token_statistics import ExtraStats, RowPartials, RowStats, Shard
from liger_trainer.kernels.runtime import use_triton


def transformed_logits(x: torch.Tensor, options: LossOptions) -> torch.Tensor:
    """``softcap * tanh(x * logit_scale / softcap) / temperature``, or ``x * logit_scale / temperature`` uncapped."""
    z = x * options.logit_scale
    if options.softcap is not None:
        z = options.softcap * torch.tanh(z / options.softcap)
    return z / options.temperature


def _transformed_rows(
    logits: torch.Tensor, options: LossOptions, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The transformed logits z as `(N, V)` of the computing dtype, and the slope of the soft-cap, None without one."""
    x = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    z = (x if bias is None else x + bias) * options.logit_scale
    if options.softcap is None:
        return z / options.temperature, None
    tanh = torch.tanh(z / options.softcap)
    return tanh * options.softcap / options.temperature, 1.0 - tanh.square()


def row_statistics_(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: RowStats,
    options: LossOptions,
    bias: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    coefficient: torch.Tensor | None = None,
    width: int | None = None,
    extra: ExtraStats | None = None,
    out: torch.Tensor | None = None,
) -> None:
    """Fills `stats`; with a `coefficient`, also writes the gradient times it to `out`, or over `logits` without `out`.

    Args:
        logits: `(N, V)` or `(B, S, V)`, last stride 1.
        target: `(N,)` contiguous labels.
        stats: Statistics of N tokens, filled; its empty fields are not computed.
        options: The loss.
        bias: `(V,)`, added to the logits in fp32.
        class_weights: `(V,)` of the computing dtype.
        coefficient: Upstream gradient of the token losses, 0-d or `(N,)`; None for statistics alone.
        width: Columns of memory that belong to a row, at least V (the default); those from V on are overwritten.
        extra: More statistics, filled; not together with class weights.
        out: Shaped as `logits`, last stride 1.
    """
    if use_triton(logits):
        launch_rows(logits, out, target, stats, options, bias, class_weights, coefficient, width, True, extra)
        return
    logits = logits if out is None else out.copy_(logits)
    vocab_size = logits.shape[-1]
    valid = target != options.ignore_index
    label = target.long()
    in_range = (label >= 0) & (label < vocab_size)
    index = torch.where(in_range, label, 0).unsqueeze(-1)
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
        row_gradient_(logits, target, stats, options, coefficient, bias, class_weights)


def row_gradient_(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: RowStats,
    options: LossOptions,
    coefficient: torch.Tensor,
    bias: torch.Tensor | None = None,
    class_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    width: int | None = None,
    entropy_coefficient: torch.Tensor | None = None,
    shard: Shard | None = None,
) -> None:
    """Writes the gradient of `logits` to `out`, or over `logits` without `out`; reads `nll` and `lse` of `stats`.

    `entropy_coefficient`, `(N,)`, is the upstream gradient of the entropies, which are then read from `stats` as well.
    With a `shard`, the logits are that shard's columns and the statistics those of the whole vocabulary. The other
    arguments are those of `row_statistics_`.
    """
    if use_triton(logits):
        launch_rows(
            logits, out, target, stats, options, bias, class_weights, coefficient, width, False,
            entropy_coefficient=entropy_coefficient, shard=shard,
        )  # fmt: skip
        return
    logits = logits if out is None else out.copy_(logits)
    columns = logits.shape[-1]
    vocab_start, vocab_size = (0, columns) if shard is None else shard
    valid = target != options.ignore_index
    label = target.long() - vocab_start
    here = (label >= 0) & (label < columns)
    index = torch.where(here, label, 0).unsqueeze(-1)
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


def row_partials_(
    logits: torch.Tensor,
    target: torch.Tensor,
    partials: torch.Tensor,
    options: LossOptions,
    shard: Shard,
    bias: torch.Tensor | None = None,
    width: int | None = None,
) -> None:
    """Fills `partials`, `(N, 8)` of the computing dtype, with the shard's `RowPartials`; ignored rows are 0.

    The labels are ids of the whole vocabulary, and most lie in another shard.
    """
    if use_triton(logits):
        unused = partials.new_empty(0)
        stats = RowStats(unused, unused, unused, unused, target)
        launch_rows(logits, None, target, stats, options, bias, None, None, width, True, partials=partials, shard=shard)
        return
    label = target.long() - shard.vocab_start
    here = (label >= 0) & (label < logits.shape[-1])
    index = torch.where(here, label, 0).unsqueeze(-1)
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
