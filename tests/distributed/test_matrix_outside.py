"""Logits that are read after the forward that FSDP gathered the head for are right, or one clear error says why."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.distributed.matrix import Cell, patched_model
from tests.distributed.matrix_batches import BATCHES
from tests.distributed.matrix_models import build_model
from tests.distributed.matrix_wrappings import WRAPPINGS

HEADS = ("full", "lora with head", "dora with head", "tied token rows")
GATHERED = ("fsdp2 tail", "fsdp2 tail resharded", "fsdp2 head alone resharded", "fsdp2 root resharded")


def _read(rank: int, wrapping: str, parameters: str, refused: bool) -> None:
    model = WRAPPINGS[wrapping].wrap(patched_model(Cell(wrapping, parameters)), None)
    batch = BATCHES["unequal"](0)[rank][0]
    outputs = model(**batch)
    if refused:
        with pytest.raises(RuntimeError, match=r"needed outside the model's forward.*Use FSDP version 2"):
            outputs.logits + 0
        return
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    torch.testing.assert_close(outputs.logits + 0, build_model(parameters)(**inputs).logits)


CASES = {
    f"{wrapping}, {parameters}": partial(_read, wrapping=wrapping, parameters=parameters, refused=wrapping == "fsdp1")
    for wrapping in (*GATHERED, "fsdp1")
    for parameters in HEADS
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_right_or_refused(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
