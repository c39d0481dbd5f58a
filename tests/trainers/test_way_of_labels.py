"""How many of our functions the labels pass on their way from `compute_loss` to the operator of the head.

The profiler sees what is on the stack when the operator is called; that is inside, and is the point: a way that can be
read from one end to the other.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import liger_trainer
from tests.trainers.builders import causal, sft

pytestmark = pytest.mark.filterwarnings("ignore")

OPERATOR = "loss_and_gradients"
ROOT = Path(liger_trainer.__file__).resolve().parent.parent
OURS = tuple(str(ROOT / folder) + "/" for folder in ("liger_trainer", "kernels"))


DISPATCH = str(ROOT / "kernels" / "operator.py")  # what torch's own dispatch of an operator does


def is_ours(code: CodeType) -> bool:
    if not code.co_filename.startswith(OURS):
        return False
    file = Path(code.co_filename).resolve()
    return file.is_relative_to(ROOT) and str(file) != DISPATCH


def holds_labels(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(holds_labels, value))
    if isinstance(value, Mapping):
        return any(map(holds_labels, value.values()))
    return type(value) is torch.Tensor and value.dtype == torch.int64 and bool((value == -100).any())


def way_and_calls(trainer: Any) -> tuple[list[CodeType], Counter[CodeType]]:
    """Our functions from `compute_loss` to the operator, and how often each of ours was called with labels."""
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    way: list[CodeType] = []
    calls: Counter[CodeType] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not is_ours(frame.f_code):
            return
        calls[frame.f_code] += holds_labels(frame.f_locals)
        if frame.f_code.co_name == OPERATOR:
            outer = frame.f_back
            while outer is not None and outer.f_code is not way_and_calls.__code__:
                if is_ours(outer.f_code):
                    way.insert(0, outer.f_code)
                outer = outer.f_back

    sys.setprofile(profile)
    try:
        trainer.compute_loss(trainer.model, batch, num_items_in_batch=9)
    finally:
        sys.setprofile(None)
    return way, calls


@pytest.mark.parametrize("build", [causal, sft])
def test_way_of_labels(build: Any, tmp_path: Path) -> None:
    way, calls = way_and_calls(build(tmp_path))
    names = [code.co_qualname for code in way]
    assert names[0].endswith("Trainer.compute_loss")
    assert len(way) <= 8, names
    assert len(set(way)) == len(way), names
    assert all(calls[code] == 1 for code in way), names
