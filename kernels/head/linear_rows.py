"""The chunk loops of log-probabilities over a head: row statistics, and gradients whose upstream comes later.

The gradient of a row of logits needs the upstream gradient of its token, which only the backward knows. Three ways:

    kept       the logits of the last tokens, as many as a budget in bytes holds, stay in memory until the backward:
               3 matmuls for these, in all
    recomputed the logits of the other tokens are computed again in the backward, a chunk at a time: 4 matmuls
    unit       for a frozen head, the gradient of each log-probability to its hidden state, (N, H) in fp32, is computed
               in the forward and multiplied by the upstream gradient in the backward: 2 matmuls for any upstream

The forward runs the tokens that are not kept first, in the memory that the kept logits fill last, and the backward the
kept ones first, and then the others in their memory: with equal budgets for both, keeping costs nothing at the peak.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from liger_trainer.kernels.head.cross_entropy_options import ExtraStats, RowOptions, RowStats, Shard, compute_dtype
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_partials_, row_statistics_
from liger_trainer.kernels.head.head_chunks import (
    COLUMN_MULTIPLE,
    ROW_MULTIPLE,
    Needs,
    allocate_gradients,
    chunk_rows,
    round_up,
)
from liger_trainer.kernels.head.loss_checks import check_labels_on_cpu
from liger_trainer.kernels.head.weight_gradient import WeightGradientSum, matmul_into

_WAVE = 2**22  # elements of a matmul's result that occupy every multiprocessor, as tiles of 128 by 256


def _width(weight: torch.Tensor) -> int:
    return round_up(weight.shape[0], COLUMN_MULTIPLE)


def _rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, weight_gradient: bool) -> int:
    """Tokens of a chunk. Without a dW to sum over chunks, more of them than fill the device once gain nothing."""
    rows = chunk_rows(hidden, weight, logits_memory, weight_gradient)
    if weight_gradient:
        return rows
    return min(rows, max(1024, round_up(_WAVE // weight.shape[1], ROW_MULTIPLE)))


def kept_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, retain_memory: int | None) -> int:
    """How many of the last tokens keep their logits: a chunk of them, or what `retain_memory` bytes hold."""
    if retain_memory is None:
        rows = chunk_rows(hidden, weight, logits_memory, weight_gradient=True)
    else:
        rows = retain_memory // (_width(weight) * hidden.element_size())
        rows -= rows % ROW_MULTIPLE if rows >= ROW_MULTIPLE else 0
    return min(hidden.shape[0], rows)


def allocate_kept(hidden: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Memory for the logits of `rows` tokens, each row padded."""
    return hidden.new_empty(rows, _width(weight))


def _spans(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    for first in range(start, stop, rows):
        yield first, min(first + rows, stop)


def _forward_logits(
    hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, keep: int, kept: list[torch.Tensor]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields (start, stop, logits) of every chunk of tokens; the kept ones last, whose memory `kept` then holds."""
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    others = tokens - keep
    rows = _rows(hidden, weight, logits_memory, weight_gradient=False)
    buffer = allocate_kept(hidden, weight, max(keep, min(rows, others)))
    for start, stop in _spans(0, others, rows):
        yield start, stop, torch.mm(hidden[start:stop], weight.t(), out=buffer[: stop - start, :vocab_size])
    if buffer.shape[0] != keep:
        del buffer
        buffer = allocate_kept(hidden, weight, keep)
    kept.append(buffer)
    if keep:
        yield others, tokens, torch.mm(hidden[others:], weight.t(), out=buffer[:, :vocab_size])


def linear_statistics_(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: RowOptions,
    logits_memory: int,
    keep: int,
    stats: RowStats,
    extra: ExtraStats,
    unit_gradient: torch.Tensor,
) -> torch.Tensor:
    """Fills `stats` and `extra`, and unless it is empty `unit_gradient`: dnll/dhidden.

    Returns the logits of the last `keep` tokens.
    """
    check_labels_on_cpu(target, weight.shape[0], options.ignore_index)
    kept: list[torch.Tensor] = []
    one = stats.loss.new_ones(()) if unit_gradient.numel() else None
    for start, stop, logits in _forward_logits(hidden, weight, logits_memory, keep, kept):
        labels, part = target[start:stop], stats.rows(start, stop)
        row_statistics_(logits, labels, part, options, bias, None, one, logits.stride(0), extra=extra.rows(start, stop))
        if one is not None:
            matmul_into(unit_gradient[start:stop], logits, weight)
    return kept[0]


def linear_partials_(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: RowOptions,
    logits_memory: int,
    keep: int,
    shard: Shard,
    partials: torch.Tensor,
) -> torch.Tensor:
    """Fills the `(N, 8)` partials of `row_partials_` for a shard of the head; returns the kept logits, as above."""
    check_labels_on_cpu(target, shard.vocab_size, options.ignore_index)
    kept: list[torch.Tensor] = []
    for start, stop, logits in _forward_logits(hidden, weight, logits_memory, keep, kept):
        row_partials_(logits, target[start:stop], partials[start:stop], options, shard, bias, logits.stride(0))
    return kept[0]


def linear_gradients(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    stats: RowStats,
    kept: torch.Tensor,
    options: RowOptions,
    logits_memory: int,
    needs: Needs,
    shard: Shard,
    overwrite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dX, dW and dbias for upstream gradients of the token losses and of the entropies.

    With `overwrite` the kept logits become their gradient, and then memory for the other chunks; without it they are
    only read, a chunk at a time.
    """
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    d_hidden, d_weight, d_bias = allocate_gradients(hidden, weight, bias, needs)
    if tokens == 0:
        return d_hidden, d_weight.zero_(), d_bias.zero_()
    others = tokens - kept.shape[0]
    rows = _rows(hidden[:others] if overwrite else hidden, weight, logits_memory, needs.weight)
    spans = [*_spans(others, tokens, tokens if overwrite else rows), *_spans(0, others, rows)]
    buffer = kept
    if not overwrite or (others > 0 and kept.shape[0] < rows):
        buffer = hidden.new_empty(min(rows, tokens), kept.shape[1])
    weight_sum = WeightGradientSum(d_weight, len(spans)) if needs.weight else None
    bias_total = d_bias.new_zeros(d_bias.shape, dtype=compute_dtype(hidden))
    for start, stop in spans:
        part, labels = hidden[start:stop], target[start:stop]
        logits = gradient = buffer[: stop - start, :vocab_size]
        if start < others:
            torch.mm(part, weight.t(), out=logits)
        else:
            logits = kept[start - others : stop - others, :vocab_size]
            gradient = logits if overwrite else gradient
        row_gradient_(
            logits,
            labels,
            stats.rows(start, stop),
            options,
            grad[start:stop],
            bias,
            out=None if gradient is logits else gradient,
            width=kept.shape[1],
            entropy_coefficient=None if grad_entropy is None else grad_entropy[start:stop],
            shard=shard,
        )
        if needs.hidden:
            torch.mm(gradient, weight, out=d_hidden[start:stop])
        if weight_sum is not None:
            weight_sum.add(gradient, part)
        if needs.bias:
            bias_total += gradient.sum(0, dtype=bias_total.dtype)
    if weight_sum is not None:
        weight_sum.finish()
    return d_hidden, d_weight, d_bias.copy_(bias_total)
