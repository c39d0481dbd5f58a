"""How much of our code one `compute_loss` runs: a reader who follows a loss reads these functions and files."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import liger_trainer
from tests.trainers.builders import dpo, llama, sft

ROOT = Path(liger_trainer.__file__).resolve().parent.parent
FOLDERS = tuple(str(ROOT / folder) for folder in ("liger_trainer", "kernels", "callbacks", "configs"))


# Comprehensions and lambdas are read as a part of their function, and Python 3.12 has made most of them that.
_INSIDE = re.compile(r"\.<locals>\.<(listcomp|setcomp|dictcomp|genexpr|lambda)>")


def trip(loss: Any) -> tuple[set[tuple[str, str]], set[str]]:
    """The functions and files of ours that ``loss()`` runs, after what the first call alone does."""
    loss().backward()
    functions: set[tuple[str, str]] = set()
    known: dict[str, str | None] = {}

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name not in known:
                path = str(Path(name).resolve())
                known[name] = path if path.startswith(FOLDERS) else None
            if known[name] is not None:
                functions.add((str(known[name]), _INSIDE.sub("", frame.f_code.co_qualname)))

    sys.setprofile(profile)
    try:
        loss()
    finally:
        sys.setprofile(None)
    return functions, {path for path, _ in functions}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("build", "most_functions", "most_files"), [(sft, 90, 25), (dpo, 120, 30)])
def test_a_loss_runs_few_functions_of_few_files(build, most_functions, most_files, tmp_path):
    trainer = build(tmp_path, llama())
    trainer.model.train()
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    items = {"num_items_in_batch": 9} if build is sft else {}
    functions, files = trip(lambda: trainer.compute_loss(trainer.model, batch, **items))
    assert len(files) > 10, "our code is not found"
    assert len(functions) <= most_functions, sorted(functions)
    assert len(files) <= most_files, sorted(files)
