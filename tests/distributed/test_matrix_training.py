"""Every cell of the matrix trains as one process does; one test for each, of one run of all that were selected.

Every wrapping with every kind of parameters, in fp32 and on padded batches, is most of the matrix: all of these are
trained before a release, and a third of them, by turns, in `make test-all`.
"""

from __future__ import annotations

from functools import partial

import pytest

from tests.distributed.matrix import CELLS, HEADS, LEFT_OUT, OF_HYBRIDS, PRECISIONS, WHOLE_LOGITS, Cell, run_cell
from tests.distributed.matrix_batches import BATCHES, LOSSES
from tests.distributed.matrix_models import PARAMETERS
from tests.distributed.matrix_wrappings import WRAPPINGS

CASES = {name: partial(run_cell, cell) for name, cell in CELLS.items()}


def _by_turns(name: str, cell: Cell) -> object:
    marks = []
    if (cell.precision, cell.packing) == ("fp32", "padded") and name not in OF_HYBRIDS:
        turn = [*WRAPPINGS].index(cell.wrapping) + [*PARAMETERS].index(cell.parameters)
        marks = [pytest.mark.long] * (turn % 3 > 0)
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("case", [_by_turns(*each) for each in CELLS.items()])
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
