"""Two steps of the trainers on packed and padded batches: the stock ones with eager attention, and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer
from trl import SFTTrainer

from liger_trainer.trainers.sft_trainer import LigerSFTTrainer
from liger_trainer.trainers.trainer import LigerTrainer
from tests.attention.families import build
from tests.attention.test_families import OURS, count_calls_of_the_function, implementation
from tests.trainers.builders import causal, losses_and_norms, sft
from tests.trainers.tiny import token_rows


def left_padded(n: int = 16) -> list[dict[str, torch.Tensor]]:
    """The rows of `token_rows`, padded in front."""
    rows = [{key: value.flip(0) for key, value in row.items()} for row in token_rows(n)]
    for row in rows:
        row["labels"][:4] = -100  # up to three are padding; the next has no predecessor but padding
    return rows


CASES: dict[str, dict[str, Any]] = {
    "packed": {"packing": True, "max_length": 32},
    "padding_free": {"padding_free": True, "max_length": None},
    "padded": {"max_length": 32},
    "LigerTrainer, padded on the right": {"rows": token_rows},
    "LigerTrainer, padded on the left": {"rows": left_padded},
}
CUT = ("packed", "padding_free", "LigerTrainer, padded on the left")
"""Cases whose rows are cut into documents; padding on the right may stay, as no token before it sees it."""


def trainer_of(folder: Any, model: str, case: str, ours: bool, **options: Any) -> Any:
    """A trainer of a tiny model for two steps.

    Args:
        folder: The folder of its output.
        model: A family of `tests.attention.families`, with a window of 5 tokens if it has windows.
        case: A key of `CASES`.
        ours: Whether it is ours; else it is the stock one with eager attention.
        options: More training arguments.
    """
    made = build(model, None if model == "llama" else 5)
    if not ours:
        made.set_attn_implementation("eager")
    # Adam would make a sign of the smallest gradients, whose rounding differs.
    options = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, **CASES[case], **options}
    if "rows" in options:
        return causal(folder, made, LigerTrainer if ours else Trainer, options.pop("rows")(), **options)
    return sft(folder, made, LigerSFTTrainer if ours else SFTTrainer, **options)


def assert_trains_as_stock(
    folder: Path, model: str, case: str, monkeypatch: pytest.MonkeyPatch, tolerance: float, **options: Any
) -> None:
    """Loss and norm of the gradient of both steps, and that ours ran our attention, with the plans of the case."""
    stock, ours = (trainer_of(folder / str(ours), model, case, ours, **options) for ours in (False, True))
    plans = count_calls_of_the_function(monkeypatch)  # the proof, before that, has plans of its own
    stock.train()
    assert not plans
    ours.train()
    assert implementation(ours.model) == OURS
    assert any(plan.offsets is not None for plan in plans) or case not in CUT
    assert any(plan.window for plan in plans) == (model != "llama")
    expected = losses_and_norms(stock)
    assert len(expected) == 4
    assert losses_and_norms(ours) == pytest.approx(expected, rel=tolerance)
