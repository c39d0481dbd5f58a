"""`LigerAdamW` in a Trainer under FSDP2: a checkpoint, resumed by as many processes or by one, loses no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.accelerate_launch import launch, outcome
from tests.distributed.accelerate_optim import CASES
from tests.once import shared_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with shared_folder(tmp_path_factory, "optim") as folder:
        if not (folder / "done").exists():
            launch("fsdp2", "accelerate_optim", str(folder), "save", *CASES)
            launch("fsdp2", "accelerate_optim", str(folder), "resume", *CASES, processes=1)
            (folder / "done").touch()
    return folder


@pytest.mark.parametrize("case", CASES)
def test_resumes_to_the_same_bits(case: str, folder: Path) -> None:
    log, wanted = outcome(folder / case)
    bf16 = CASES[case][1] == "no"
    stored = {name.partition(", ")[2] for name in wanted}
    assert log["kinds"] == [f"DTensor torch.{'bfloat16' if bf16 else 'float32'}"]
    assert ("remainder" in stored, "exp_avg_codes" in stored) == (bf16, bf16)
    for processes in (2, 1):
        resumed_log, resumed = outcome(folder / f"{case}.{processes}")
        assert resumed_log["loss"] == log["loss"]
        assert resumed.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(resumed[name], value), (processes, name)
