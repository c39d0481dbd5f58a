"""The statistics that a TRL loss needs, of a batch that its model gets as packed rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from liger_trainer.head.context import labelled_rows_at_most
from liger_trainer.kernels.copied_rows import copied_rows
from liger_trainer.packing.packed_row import PackedRow, each_row, rows_of
from liger_trainer.trainers.token_statistics import StatisticsOptions, TokenStatistics, token_statistics


def packed_statistics(
    model: Any,
    forward: Callable[[dict[str, torch.Tensor]], Any],
    rows: Sequence[PackedRow],
    shape: torch.Size,
    options: StatisticsOptions,
) -> tuple[TokenStatistics, torch.Tensor | None]:
    """The statistics of a batch as its padded forward would give them, and the router's loss if the model returns one.

    Args:
        model: The transformers model.
        forward: Its outputs for `input_ids`, `position_ids` and `attention_mask` of a packed row.
        rows: The packed rows.
        shape: Of the batch's labels.
        options: What the trainer asks of the head.
    """
    recomputed = dataclasses.replace(options, recomputed=True)

    def of(row: PackedRow) -> tuple[TokenStatistics, torch.Tensor | None]:
        with row.attended(), labelled_rows_at_most(None):
            outputs = forward(row.inputs)
            logits = rows_of(outputs.logits, row.scored.tokens)
            found = token_statistics(logits, row.scored.labels, options if row is rows[-1] else recomputed)
        return found, getattr(outputs, "aux_loss", None)

    found = each_row(of, rows, model)
    fields = {
        name: _scattered([getattr(each, name) for each, _ in found], rows, shape)
        for name, value in found[0][0]._asdict().items()
        if value is not None
    }
    return TokenStatistics(**fields), found[-1][1]


def _scattered(values: list[torch.Tensor], rows: Sequence[PackedRow], shape: torch.Size) -> torch.Tensor:
    """The values of the tokens that each packed row has scored, at their places in zeros of `shape`."""
    batch = values[0].new_zeros(shape.numel())
    for value, row in zip(values, rows):
        scored = row.scored
        if value.is_floating_point():
            # A row without labels adds no value, but has a backward, as it has on the other processes.
            batch = batch.index_copy(0, scored.places, copied_rows(value, scored.copies))
        else:
            batch = batch.index_copy(0, scored.places, value[scored.copies.index])
    return batch.view(shape)
