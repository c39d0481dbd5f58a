"""The numbers that a loss computes for each token, which is one row of logits.

`cross_entropy_rows` fills `RowStats` and `ExtraStats`; every loss of this folder that takes labels is built from
them, and log-probabilities are returned as `LogProbsOutput`.

A vocabulary may be split into shards of columns: over the processes of a group (`vocab_parallel`), or over several
pieces of memory (`large_first_chunk`). Each shard gives eight numbers a row (`RowPartials`), and `combine`
makes the statistics of the whole row from them. The label is not part of a shard's sum of exponentials, so nothing
cancels however confident a token is.

Shapes: N tokens; every statistic is (N,).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.head.loss_options import LossOptions


class RowStats(NamedTuple):
    """Statistics of every token; floating tensors are fp32 (float64 for float64 logits).

    `entropy` and `predicted` are empty if they were not asked for. Ignored tokens hold 0, and -1 in `predicted`.
    """

    loss: torch.Tensor
    nll: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    predicted: torch.Tensor

    @classmethod
    def allocate(cls, logits: torch.Tensor, tokens: int, entropy: bool, predicted: bool) -> RowStats:
        """Uninitialised statistics of `tokens` tokens on the device of `logits`."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return cls(
            logits.new_empty(tokens, dtype=dtype),
            logits.new_empty(tokens, dtype=dtype),
            logits.new_empty(tokens, dtype=dtype),
            logits.new_empty(tokens if entropy else 0, dtype=dtype),
            logits.new_empty(tokens if predicted else 0, dtype=torch.int64),
        )

    @classmethod
    def of_backward(cls, nll: torch.Tensor, lse: torch.Tensor, entropy: torch.Tensor | None = None) -> RowStats:
        """The statistics that a gradient reads. The other fields are never touched and repeat `lse`."""
        return cls(lse, nll, lse, lse if entropy is None or not entropy.numel() else entropy, lse)

    def rows(self, start: int, stop: int) -> RowStats:
        """The statistics of tokens `start` to `stop`, as views."""
        loss, nll, lse, entropy, predicted = self
        rows = slice(start, stop)
        return RowStats(loss[rows], nll[rows], lse[rows], entropy[rows], predicted[rows])


class ExtraStats(NamedTuple):
    """Statistics that log-probabilities offer besides `RowStats`; empty if not asked for, 0 at ignored tokens.

    `mean_logit` is the mean of z over the vocabulary, `sum_squared_probs` the logarithm of the sum of p**2.
    """

    mean_logit: torch.Tensor
    sum_squared_probs: torch.Tensor

    @classmethod
    def allocate(cls, logits: torch.Tensor, tokens: int, mean_logit: bool, sum_squared_probs: bool) -> ExtraStats:
        """Uninitialised statistics of `tokens` tokens on the device of `logits`."""
        dtype = torch.promote_types(logits.dtype, torch.float32)
        return cls(
            logits.new_empty(tokens if mean_logit else 0, dtype=dtype),
            logits.new_empty(tokens if sum_squared_probs else 0, dtype=dtype),
        )

    def rows(self, start: int, stop: int) -> ExtraStats:
        """The statistics of tokens `start` to `stop`, as views."""
        return ExtraStats(self.mean_logit[start:stop], self.sum_squared_probs[start:stop])


class Shard(NamedTuple):
    """The columns of a vocabulary of `vocab_size` ids that the logits hold: all theirs, from `vocab_start` on."""

    vocab_start: int
    vocab_size: int


class RowPartials(NamedTuple):
    """One shard's contribution to a row's statistics; "rest" stands for all its columns except the label's.

    Attributes:
        rest: logsumexp of z over the rest, -inf if there is none.
        rest_mean: Mean of z under the softmax of the rest.
        rest_squares: logsumexp of 2 z over the rest.
        label_z: z of the label, 0 if another shard holds it.
        found: 1 if the label is in this shard, else 0.
        total: Sum of z.
        best: The largest z, in a unit that is the same on every shard.
        best_id: Its id in the whole vocabulary, the lowest of equals.
    """

    rest: torch.Tensor
    rest_mean: torch.Tensor
    rest_squares: torch.Tensor
    label_z: torch.Tensor
    found: torch.Tensor
    total: torch.Tensor
    best: torch.Tensor
    best_id: torch.Tensor


def combine(
    partials: torch.Tensor, target: torch.Tensor, options: LossOptions, shard: Shard, vocab_size: int, own: int | None
) -> tuple[RowStats, ExtraStats]:
    """The statistics of whole rows from the `(shards, N, 8)` partials of all shards, in the order of their columns.

    Smoothing spreads over the `shard.vocab_size` classes of the vocabulary, or of the shard with the number `own`.
    """
    fields = RowPartials(*partials.unbind(-1))
    rest = fields.rest.logsumexp(0)
    label_z = torch.where(fields.found.sum(0) > 0, fields.label_z.sum(0), math.nan)  # a label in no shard has no loss
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


def check_labels_on_cpu(target: torch.Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raises ValueError for a label outside [0, vocab_size); only on the CPU, where reading them costs no wait."""
    if target.device.type != "cpu" or target.numel() == 0 or torch.compiler.is_compiling():
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= vocab_size))
    if bool(wrong.any()):
        labels = target[wrong]
        worst = int(labels.max()) if int(labels.max()) >= vocab_size else int(labels.min())
        raise ValueError(
            f"`target` holds the label {worst}, outside [0, {vocab_size}) and not ignore_index={ignore_index} "
            f"({int(wrong.sum())} such labels); check that the tokenizer and the model have the same vocabulary."
        )


LOG_PROBS_OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")


@dataclasses.dataclass
class LogProbsOutput:
    """Log-probabilities and the outputs that were asked for, all shaped as `target`; the others are None.

    Attributes:
        log_probs: fp32, log-probability of the target; 0 at ignored tokens, as are all others.
        entropy: fp32, of the distribution after scale, soft-cap and temperature; it has a gradient too.
        top1: bool, whether the target is the most likely id (the lowest of equals).
        mean_logit: fp32, mean of the transformed logits over the vocabulary, without gradient.
        sum_squared_probs: fp32, log of the sum of the squared probabilities, without gradient.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    top1: torch.Tensor | None = None
    mean_logit: torch.Tensor | None = None
    sum_squared_probs: torch.Tensor | None = None


def log_probs_with_outputs(
    log_probs: torch.Tensor,
    entropy: torch.Tensor,
    predicted: torch.Tensor,
    mean_logit: torch.Tensor,
    squares: torch.Tensor,
    labels: torch.Tensor,
    ignore_index: int,
    outputs: Sequence[str],
    shape: torch.Size,
) -> torch.Tensor | LogProbsOutput:
    """The log-probabilities alone, or with the requested `outputs`, all of `shape`."""
    if not outputs:
        return log_probs.view(shape)
    result = LogProbsOutput(log_probs.view(shape))
    if "entropy" in outputs:
        result.entropy = entropy.view(shape)
    if "top1" in outputs:
        result.top1 = ((predicted == labels) & (labels != ignore_index)).view(shape)
    if "mean_logit" in outputs:
        result.mean_logit = mean_logit.view(shape)
    if "sum_squared_probs" in outputs:
        result.sum_squared_probs = squares.view(shape)
    return result
