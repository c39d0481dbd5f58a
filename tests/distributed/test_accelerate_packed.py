"""Adapters on packed checkpoints under `accelerate launch` with the shipped FSDP2: trained, saved and resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from liger_trainer import load_packed
from liger_trainer.packed.loading import dequantise
from tests.distributed.accelerate_launch import launch, outcome, relative
from tests.distributed.accelerate_packed import CASES
from tests.packed_checkpoints import write_dense, write_mixture
from tests.trainers.tiny import tokenizer

TOLERANCE = 1e-5
"""Of losses, gradient norms and adapters after the last step, relative to themselves, in fp32."""
IN_FP32 = [case for case, (*_, precision) in CASES.items() if precision == "no"]
WHOLE = [case for case, (_, form, _) in CASES.items() if form == "FULL_STATE_DICT"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    for name in ("fp8 blocks", "nvfp4"):
        write_dense(_made(folder / "models" / name), name)
    write_mixture(_made(folder / "models" / "experts"))
    for wrapping in ("single", "fsdp2"):
        launch(wrapping, "accelerate_packed", str(_made(folder / wrapping)), "save", *CASES)
    launch("fsdp2", "accelerate_packed", str(folder / "fsdp2"), "resume", *CASES, processes=1)
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_each_process_holds_its_rows_of_codes_that_stay_as_they_are(case: str, folder: Path) -> None:
    (log, weights), (_, alone) = (outcome(folder / wrapping / case) for wrapping in ("fsdp2", "single"))
    assert log["kinds"] == ["DTensor torch.uint8"]
    assert 0.45 < log["share"] < 0.55
    assert weights.keys() == alone.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in alone.items() if "lora_" not in name)


@pytest.mark.parametrize("case", IN_FP32)
def test_trains_as_one_process(case: str, folder: Path) -> None:
    (log, weights), (wanted, alone) = (outcome(folder / wrapping / case) for wrapping in ("fsdp2", "single"))
    for name in ("loss", "grad_norm"):
        assert log[name] == pytest.approx(wanted[name], rel=TOLERANCE)
    for name, weight in alone.items():
        assert relative(weights[name], weight) <= TOLERANCE, name


@pytest.mark.parametrize("case", CASES)
def test_resumes_to_the_same_weights(case: str, folder: Path) -> None:
    log, weights = outcome(folder / "fsdp2" / case)
    for processes in (2, 1) if case in IN_FP32 else (2,):
        resumed_log, resumed = outcome(folder / "fsdp2" / f"{case}.{processes}")
        assert resumed_log["loss"] == pytest.approx(log["loss"], rel=TOLERANCE)
        for name, weight in weights.items():
            assert relative(resumed[name], weight) <= TOLERANCE, name


@pytest.mark.parametrize("case", WHOLE)
def test_what_is_saved_are_adapters_that_load_on_the_dequantised_model(case: str, folder: Path) -> None:
    final = folder / "fsdp2" / case / "final"
    assert all(".lora_" in name for name in load_file(final / "adapter_model.safetensors"))
    model = dequantise(load_packed(str(folder / "models" / CASES[case][0]), dtype=torch.float32))
    loaded = {
        name.replace(".default.", "."): each
        for name, each in PeftModel.from_pretrained(model, final).named_parameters()
    }
    trained = {name: each for name, each in outcome(folder / "fsdp2" / case)[1].items() if "lora_" in name}
    assert trained
    for name, weight in trained.items():
        assert torch.equal(loaded[name.replace(".default.", ".")], weight), name
