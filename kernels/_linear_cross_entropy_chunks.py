"""The row step of `linear_cross_entropy` in the chunk loop of a head."""

from __future__ import annotations

import torch

from liger_trainer.kernels._cross_entropy_options import RowOptions, RowStats
from liger_trainer.kernels._cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels._head_chunks import Needs, chunk_rows, run_head_chunks
from liger_trainer.kernels._loss_checks import check_labels_on_cpu


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
    return run_head_chunks(hidden, weight, bias, rows, needs, step)
