"""The chunk loop of `linear_cross_entropy`: how many tokens each chunk holds, its matmuls, and how dW is summed."""

from __future__ import annotations

import torch

from liger_trainer.kernels._cross_entropy_options import RowOptions, RowStats, compute_dtype
from liger_trainer.kernels._cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels._head_chunks import COLUMN_MULTIPLE, Needs, allocate_gradients, chunk_rows, round_up
from liger_trainer.kernels._loss_checks import check_labels_on_cpu
from liger_trainer.kernels._weight_gradient import WeightGradientSum
from liger_trainer.kernels._weight_gradient_panels import plan_panels, run_panels
from liger_trainer.kernels.runtime import cdiv


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
    rows = chunk_rows(hidden, weight, logits_memory, needs.weight)
    width = round_up(vocab_size, COLUMN_MULTIPLE)
    buffer = hidden.new_empty(rows, width)
    plan = plan_panels(hidden, d_weight, rows) if needs.weight and class_weights is None else None
    first = 0 if plan is None else plan.tokens
    chunks = cdiv(tokens - first, rows) + (plan is not None)
    weight_sum = WeightGradientSum(d_weight, chunks) if needs.weight else None
    bias_total = d_bias.new_zeros(d_bias.shape, dtype=compute_dtype(hidden))
    if plan is not None:
        assert coefficient is not None
        assert weight_sum is not None
        run_panels(
            plan,
            hidden[:first],
            weight,
            target[:first],
            bias,
            options,
            stats.rows(0, first),
            coefficient[:first] if coefficient.dim() else coefficient,
            recompute,
            buffer,
            d_hidden[:first] if needs.hidden else None,
            weight_sum,
            bias_total if needs.bias else None,
        )
    for start in range(first, tokens, rows):
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
