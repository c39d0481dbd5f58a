"""The chunk loop of `linear_cross_entropy`: how many tokens a chunk holds, its matmuls, and how dW is summed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.cross_entropy_options import RowOptions, RowStats, check_labels_on_cpu, compute_dtype
from liger_trainer.kernels.cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels.weight_gradient import MAX_HALF_CHUNKS, WeightGradientSum

_COLUMN_MULTIPLE = 64  # of the buffer's rows: matmuls lose their fast path on odd strides
_ROW_MULTIPLE = 128  # of a chunk: a matmul tile


class Needs(NamedTuple):
    """Which gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _chunk_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, weight_gradient: bool) -> int:
    """Tokens of a chunk: as many as `logits_memory` bytes hold, spread evenly over the chunks.

    The budget is exceeded in one case: where it would take a half-precision dW over `MAX_HALF_CHUNKS` chunks, and so
    into an fp32 accumulator of V*H more elements' worth of memory, the buffer grows instead while that costs less.
    """
    tokens, hidden_size = hidden.shape
    rows = max(1, logits_memory // (_round_up(weight.shape[0], _COLUMN_MULTIPLE) * hidden.element_size()))
    if rows >= _ROW_MULTIPLE:
        rows -= rows % _ROW_MULTIPLE
    if weight_gradient and hidden.element_size() == 2:
        few = -(-tokens // MAX_HALF_CHUNKS)
        few = _round_up(few, _ROW_MULTIPLE) if few >= _ROW_MULTIPLE else few
        if rows < few <= rows + hidden_size:
            rows = few
    chunks = -(-tokens // rows)
    even = -(-tokens // max(chunks, 1))
    return max(1, min(rows, _round_up(even, _ROW_MULTIPLE)))


def run_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    options: RowOptions,
    logits_memory: int,
    stats: RowStats,
    coefficient: torch.Tensor | None,
    needs: Needs,
    recompute: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fills `stats`, or with `recompute` reads them, and returns dX, dW and dbias, empty where not needed."""
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    check_labels_on_cpu(target, vocab_size, options.ignore_index)
    d_hidden, d_weight, d_bias = allocate_gradients(hidden, weight, bias, needs)
    if tokens == 0:
        return d_hidden, d_weight.zero_(), d_bias.zero_()
    rows = _chunk_rows(hidden, weight, logits_memory, needs.weight)
    width = _round_up(vocab_size, _COLUMN_MULTIPLE)
    buffer = hidden.new_empty(rows, width)
    weight_sum = WeightGradientSum(d_weight, -(-tokens // rows)) if needs.weight else None
    bias_total = d_bias.new_zeros(d_bias.shape, dtype=compute_dtype(hidden))
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        part, labels, part_stats = hidden[start:stop], target[start:stop], stats.rows(start, stop)
        logits = torch.mm(part, weight.t(), out=buffer[: stop - start, :vocab_size])
        upstream = coefficient[start:stop] if coefficient is not None and coefficient.dim() else coefficient
        if recompute:
            assert upstream is not None
            row_gradient_(logits, labels, part_stats, options, upstream, bias, class_weights, width=width)
        else:
            row_statistics_(logits, labels, part_stats, options, bias, class_weights, upstream, width)
        if needs.hidden:
            torch.mm(logits, weight, out=d_hidden[start:stop])
        if weight_sum is not None:
            weight_sum.add(logits, part)
        if needs.bias:
            bias_total += logits.sum(0, dtype=bias_total.dtype)
        del logits
    del buffer
    if weight_sum is not None:
        weight_sum.finish()
    return d_hidden, d_weight, d_bias.copy_(bias_total)


def allocate_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: Needs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised dX, dW and dbias with the strides autograd wants to adopt them; empty where not needed."""
    return (
        torch.empty_like(hidden) if needs.hidden else hidden.new_empty(0),
        torch.empty_like(weight) if needs.weight else weight.new_empty(0),
        torch.empty_like(bias) if needs.bias and bias is not None else weight.new_empty(0),
    )
