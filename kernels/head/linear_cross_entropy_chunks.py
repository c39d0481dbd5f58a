"""The row step of `linear_cross_entropy` in the chunk loop of a head."""

from __future__ import annotations

import functools

import torch

from liger_trainer.kernels.head.cross_entropy_options import RowOptions, RowStats
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels.head.head_chunks import FirstChunk, Needs, chunk_rows, run_head_chunks
from liger_trainer.kernels.head.loss_checks import check_labels_on_cpu
from liger_trainer.kernels.head.matmul_precision import fp32_reductions
from liger_trainer.kernels.head.weight_gradient_panels import plan_panels, run_panels


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
    check_labels_on_cpu(target, weight.shape[0], options.ignore_index)

    def step(logits: torch.Tensor, start: int, stop: int) -> None:
        labels, part, width = target[start:stop], stats.rows(start, stop), logits.stride(0)
        upstream = coefficient[start:stop] if coefficient is not None and coefficient.dim() else coefficient
        if recompute:
            assert upstream is not None
            row_gradient_(logits, labels, part, options, upstream, bias, class_weights, width=width)
        else:
            row_statistics_(logits, labels, part, options, bias, class_weights, upstream, width)

    rows = chunk_rows(hidden, weight, logits_memory, needs.weight)
    plan = plan_panels(hidden, weight, rows) if needs.weight and class_weights is None else None
    first = None
    if plan is not None:
        assert coefficient is not None
        part = slice(0, plan.tokens)
        upstream = coefficient[part] if coefficient.dim() else coefficient
        chunk = hidden[part], weight, target[part], bias, options, stats.rows(0, plan.tokens), upstream, recompute
        first = FirstChunk(plan.tokens, functools.partial(run_panels, plan, *chunk))
    with fp32_reductions(weight):
        return run_head_chunks(hidden, weight, bias, rows, needs, step, first)
