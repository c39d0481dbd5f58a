"""The statistics of whole rows of logits from those of shards of their vocabulary (`RowPartials`).

Shards lie on the processes of a group (`vocab_parallel`), or in several pieces of memory (`_weight_gradient_panels`).
The label is no part of a shard's sum of exponentials, so that nothing cancels however confident a token is.
"""

from __future__ import annotations

import math

import torch

from liger_trainer.kernels.head.cross_entropy_options import ExtraStats, RowOptions, RowPartials, RowStats, Shard


def combine(
    partials: torch.Tensor, target: torch.Tensor, options: RowOptions, shard: Shard, vocab_size: int, own: int | None
) -> tuple[RowStats, ExtraStats]:
    """The statistics of whole rows from the `(shards, N, 8)` partials of all shards, in the order of their columns.

    Smoothing spreads over the `shard.vocab_size` classes of the vocabulary, or of the shard `own`.
    """
    fields = RowPartials(*partials.unbind(-1))
    rest = fields.rest.logsumexp(0)
    label_z = torch.where(fields.found.sum(0) > 0, fields.label_z.sum(0), math.nan)  # no shard's label has no loss
    nll = torch.nn.functional.softplus(rest - label_z, threshold=50.0)
    lse = torch.logaddexp(rest, label_z)
    lowest = torch.finfo(lse.dtype).min
    mean = ((fields.rest - lse).exp() * fields.rest_mean).sum(0) + (-nll).exp() * label_z.clamp(min=lowest)
    squares = torch.logaddexp(fields.rest_squares.logsumexp(0), 2.0 * label_z) - 2.0 * lse
    total = fields.total.sum(0)
    predicted = fields.best_id.gather(0, fields.best.argmax(0, keepdim=True)).squeeze(0).long()
    loss = (1.0 - options.label_smoothing) * nll + options.z_loss * lse.square()
    if options.label_smoothing > 0.0:
        smoothed = total if own is None else fields.total[own]
        loss = loss + options.label_smoothing * (lse - smoothed / shard.vocab_size)
    valid = target != options.ignore_index
    loss, nll, lse, entropy, mean_logit, squares = (
        torch.where(valid, value, 0.0) for value in (loss, nll, lse, lse - mean, total / vocab_size, squares)
    )
    return RowStats(loss, nll, lse, entropy, torch.where(valid, predicted, -1)), ExtraStats(mean_logit, squares)
