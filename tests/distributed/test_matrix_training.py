"""Every cell of the matrix trains as one process does; one test for each, of one run of all that were selected."""

from __future__ import annotations

from functools import partial

import pytest

from tests.distributed.matrix import CELLS, HEADS, LEFT_OUT, OF_HYBRIDS, PRECISIONS, WHOLE_LOGITS, run_cell
from tests.distributed.matrix_batches import BATCHES, LOSSES
from tests.distributed.matrix_models import PARAMETERS
from tests.distributed.matrix_wrappings import WRAPPINGS

CASES = {name: partial(run_cell, cell) for name, cell in CELLS.items()}


@pytest.mark.parametrize("case", CASES)
def test_two_processes_train_as_one(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]


def test_every_pair_runs_or_has_a_reason() -> None:
    names = (PARAMETERS, PRECISIONS, LOSSES, BATCHES)
    run = {
        (cell.wrapping, name)
        for key, cell in CELLS.items()
        if key not in OF_HYBRIDS
        for name in (cell.parameters, cell.precision, cell.loss, cell.batches)
    }
    pairs = {(wrapping, name) for wrapping in WRAPPINGS for part in names for name in part}
    assert run | set(LEFT_OUT) == pairs
    assert not run & set(LEFT_OUT)
    assert set(WHOLE_LOGITS) <= pairs


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_every_loss_precision_and_kind_of_batches_trains_a_head(wrapping: str) -> None:
    cells = [cell for cell in CELLS.values() if cell.wrapping == wrapping]
    cells = [cell for cell in cells if cell.parameters in HEADS]
    assert {cell.loss for cell in cells if cell.precision == "fp32"} == LOSSES.keys()
    assert {cell.batches for cell in cells if cell.precision == "fp32"} == BATCHES.keys()
    left_out = {name for name in PRECISIONS if (wrapping, name) in LEFT_OUT}
    assert PRECISIONS.keys() - {cell.precision for cell in cells} == left_out
