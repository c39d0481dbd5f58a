"""Checkpoints of the real trainers in every sharded mode: the stock trainer's files, resumed to the same weights.

With GPUs, one at least, all modes run with NCCL; elsewhere some of them with gloo.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.accelerate_cases import VOCAB
from tests.distributed.accelerate_checkpoints import IN_SHARDS, SAVED, STOCK_RESUMES
from tests.distributed.accelerate_launch import Launches, Outcome, on_gpus, outcome, relative, together
from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED
from tests.distributed.matrix_models import build_model
from tests.once import shared_folder

TOLERANCE = 1e-3
"""Of weights, relative to the way they went; AdamW's steps are rounded more than those of SGD."""

WHOLE = ("full", "lora with head")
MODES: dict[str, tuple[str, ...]] = {
    "ddp": WHOLE,
    "fsdp1": ("full", IN_SHARDS),  # our trainers refuse to save adapters there, which PEFT would lose
    "fsdp2": (*WHOLE, IN_SHARDS),
    "fsdp2 kept": (IN_SHARDS,),
    "zero2": WHOLE,
    "zero3": WHOLE,
}
ON_CPU = ("fsdp2", "zero3")
ON_CPU_BY_ONE = ("fsdp2",)
RESUMED_BY_ONE = {"ddp": WHOLE, "fsdp2": (*WHOLE, IN_SHARDS), "zero2": ("full",), "zero3": ("full",)}
PAIRS = [(mode, name) for mode, names in MODES.items() if on_gpus() or mode in ON_CPU for name in names]
if not HAS_DEEPSPEED:
    PAIRS = [(mode, name) for mode, name in PAIRS if not mode.startswith("zero")]
BY_ONE = [(mode, name) for mode, name in PAIRS if on_gpus() or mode in ON_CPU_BY_ONE]
BY_ONE = [(mode, name) for mode, name in BY_ONE if name in RESUMED_BY_ONE.get(mode, ())]
LOSES = {("fsdp1", IN_SHARDS): "the optimizer's moments, in accelerate"}
"""What a checkpoint lacks, the stock trainer's too."""


class Runs:
    """The launches."""

    def __init__(self, folder: Path) -> None:
        self.launches = Launches(folder)
        alone = {mode for mode, _ in BY_ONE}
        modes = dict.fromkeys(mode for mode, _ in PAIRS)
        together([partial(self.by_one if mode in alone else self.saved, mode) for mode in modes])

    def saved(self, mode: str) -> Path:
        """The folder where two processes have saved, and resumed."""
        return self.launches.once(mode, "accelerate_checkpoints", "save", *MODES[mode])

    def by_one(self, mode: str) -> Path:
        """The same folder, where one process has resumed as well."""
        self.saved(mode)
        return self.launches.once(mode, "accelerate_checkpoints", "resume", *RESUMED_BY_ONE[mode], processes=1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    with shared_folder(tmp_path_factory, "checkpoints") as folder:
        return Runs(folder)


def _check_weights(name: str, ours: Outcome, wanted: Outcome) -> None:
    assert ours[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=1e-5)
    for path, before in build_model(SAVED[name][0], vocab_size=VOCAB).named_parameters():
        if before.requires_grad:
            error = relative(ours[1][path], wanted[1][path], before.detach())
            assert error <= TOLERANCE, f"{path} is off by {error:.1e} of its way"


def _files(folder: Path) -> set[str]:
    """What a training leaves, but for the card that SFT writes of it."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if Path(name).name != "README.md"}


@pytest.mark.parametrize(("mode", "name"), PAIRS)
def test_files_are_those_of_the_stock_trainer(mode: str, name: str, runs: Runs) -> None:
    ours, stock = (runs.saved(mode) / name / kind for kind in ("ours", "stock"))
    of_model = {file for file in _files(ours) if name == IN_SHARDS and file.startswith("final/")}
    assert _files(ours) - of_model == _files(stock) | {"report.html"}
    assert ("final/model.safetensors" in of_model) == (name == IN_SHARDS)  # the stock trainer writes none there
    weights = [Path(file) for file in _files(stock) if file.endswith(".safetensors")]
    assert weights or name == IN_SHARDS
    for file in weights:
        assert load_file(ours / file).keys() == load_file(stock / file).keys()


@pytest.mark.parametrize(("mode", "name"), PAIRS)
def test_resumes_to_the_same_weights(mode: str, name: str, runs: Runs) -> None:
    folder = runs.saved(mode)
    uninterrupted = outcome(folder / f"{name}.ours")
    _check_weights(name, uninterrupted, outcome(folder / f"{name}.stock"))
    resumed = outcome(folder / f"{name}.ours.2")
    if name in STOCK_RESUMES:
        _check_weights(name, resumed, outcome(folder / f"{name}.stock.2"))
    if (mode, name) not in LOSES:
        _check_weights(name, resumed, uninterrupted)


@pytest.mark.parametrize(("mode", "name"), [pair for pair in BY_ONE if not pair[0].startswith("zero")])
def test_one_process_resumes_what_two_saved(mode: str, name: str, runs: Runs) -> None:
    folder = runs.by_one(mode)
    _check_weights(name, outcome(folder / f"{name}.ours.1"), outcome(folder / f"{name}.ours"))


@pytest.mark.parametrize("mode", [mode for mode, _ in BY_ONE if mode.startswith("zero")])
def test_zero_says_that_it_keeps_its_number_of_processes(mode: str, runs: Runs) -> None:
    folder = runs.by_one(mode)
    with pytest.raises(AssertionError, match="used a DP world size of 2 but the current world size is 1"):
        outcome(folder / "full.ours.1")


@pytest.mark.parametrize("mode", dict.fromkeys(mode for mode, _ in PAIRS))
def test_what_is_saved_loads_without_us(mode: str, runs: Runs) -> None:
    """The whole model by transformers; the adapters by PEFT, merged into the plain model."""
    folder = runs.saved(mode)
    for name in {"full", IN_SHARDS} & {*MODES[mode]}:
        model = AutoModelForCausalLM.from_pretrained(folder / name / "ours" / "final", dtype=torch.float32)
        for path, trained in outcome(folder / f"{name}.ours")[1].items():
            torch.testing.assert_close(model.state_dict()[path], trained, rtol=0, atol=0)
    if "lora with head" not in MODES[mode]:
        return
    plain = build_model("full", vocab_size=VOCAB)
    merged = PeftModel.from_pretrained(plain, folder / "lora with head" / "ours" / "final").merge_and_unload()
    wanted = build_model("lora with head", vocab_size=VOCAB)
    wanted.load_state_dict(outcome(folder / "lora with head.ours")[1])
    ids = torch.arange(3, 11).unsqueeze(0)
    assert "liger" not in f"{merged}{vars(merged)}"
    torch.testing.assert_close(merged.eval()(ids).logits, wanted.eval()(ids).logits, rtol=1e-4, atol=1e-4)
