"""The real trainers under `accelerate launch` with the shipped configurations train as the stock trainer alone does.

On a machine with enough GPUs every case runs with NCCL in every wrapping; elsewhere a part of them runs with gloo.
`-s` prints a table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("trl")
pytest.importorskip("peft")
if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from tests.distributed.accelerate_cases import CASES, VOCAB, WRAPPINGS
from tests.distributed.accelerate_launch import launch, on_gpus, outcome, relative, save_models
from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED
from tests.distributed.matrix_models import build_model

TOLERANCE = 2e-4
"""Of losses and gradient norms relative to themselves, of parameters to the way they went, in fp32."""
BF16_TOLERANCE = 5e-2

SPREAD = {
    "ddp": "DistributedDataParallel",
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "DTensor on (2,)",
    "fsdp2 kept": "DTensor on (2,)",
    "hsdp": "DTensor on (2, 2)",
    "zero2": "DeepSpeedEngine",
    "zero3": "ZeRO-3",
}

_FSDP1_REFERENCE = "torch refuses FSDP1's frozen units after the forward without adapters; TRL's trainer fails alike"
LEFT_OUT = {("fsdp1", name): _FSDP1_REFERENCE for name in ("dpo, lora", "dpo, lora with head")}

_EVERYWHERE = ("trainer, full", "trainer, tied head", "sft, lora with head", "a rank without labels")
ON_CPU: dict[str, tuple[str, ...]] = {
    "ddp": (*_EVERYWHERE, "sft, lora", "dpo, lora", "grpo, full", "short last", "checkpointed, reentrant"),
    "fsdp1": (*_EVERYWHERE, "sft, tied head", "dpo, full", "grpo, lora", "accumulated, sft", "checkpointed"),
    "fsdp2": (*_EVERYWHERE, "dpo, full", "grpo, lora", "accumulated", "clipped", "checkpointed"),
    "fsdp2 kept": ("sft, full", "trainer, lora with head", "dpo, lora with head"),
    "hsdp": ("trainer, full", "sft, lora with head"),
    "zero2": (*_EVERYWHERE, "trainer, lora", "dpo, full", "accumulated", "means of ranks"),
    "zero3": (*_EVERYWHERE, "a rank without labels, sft", "dpo, full", "dpo, lora with head", "accumulated, sft"),
}
"""What runs where there are no GPUs: every case once, and what shards differently everywhere."""


def _cases(wrapping: str) -> list[str]:
    if not on_gpus(wrapping):
        return list(ON_CPU[wrapping])
    return [name for name in CASES if (wrapping, name) not in LEFT_OUT]


ALL = [(wrapping, name) for wrapping in SPREAD for name in _cases(wrapping)]


class Runs:
    """The launches, each made when its first case is looked at, for all the cases that were selected."""

    def __init__(self, folder: Path, selected: list[tuple[str, str]]) -> None:
        self.folder, self.selected, self.failed = folder, selected, {}
        save_models(folder)

    def of(self, wrapping: str) -> Path:
        """The folder of a launch."""
        folder = self.folder / wrapping
        if not folder.exists():
            folder.mkdir()
            chosen = dict.fromkeys(name for where, name in self.selected if wrapping in (where, "single"))
            names = [name for name in chosen if wrapping != "single" or not CASES[name].of_wrapping]
            try:
                launch(wrapping, "accelerate_worker", str(folder), *names)
            except AssertionError as error:
                self.failed[wrapping] = str(error)
        return folder


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [(each["wrapping"], each["name"]) for each in chosen if {"wrapping", "name"} <= each.keys()]
    return Runs(tmp_path_factory.mktemp("accelerate"), [pair for pair in selected if pair in ALL])


@pytest.mark.parametrize(("wrapping", "name"), ALL)
def test_trains_as_the_stock_trainer_alone(wrapping: str, name: str, runs: Runs) -> None:
    case = CASES[name]
    if wrapping.startswith("zero") and not HAS_DEEPSPEED:
        pytest.skip("needs deepspeed")
    folder = runs.of(wrapping)
    try:
        ours, weights = outcome(folder / f"{name}.ours")
    except AssertionError:
        print(runs.failed.get(wrapping, "")[-6000:])
        raise
    wanted, after = outcome((folder if case.of_wrapping else runs.of("single")) / f"{name}.stock")
    tolerance = BF16_TOLERANCE if dict(case.options).get("bf16") else TOLERANCE
    model = build_model(case.parameters, vocab_size=VOCAB)
    errors = {
        key: relative(torch.tensor(ours[key]), torch.tensor(wanted[key]))
        for key in ("loss", "grad_norm")
        if any(wanted[key])  # GRPO's is zero
    }
    errors["weights"] = max(
        relative(weights[path], after[path], before.detach())
        for path, before in model.named_parameters()
        if before.requires_grad
    )
    print(f"{wrapping:11} {name:28}", *(f"{key} {value:.1e}" for key, value in errors.items()), ours["gathers"])
    assert max(errors.values()) <= tolerance, errors
    assert ours["spread"] == SPREAD[wrapping]
    if wrapping == "zero3" and case.trainer in ("trainer", "sft"):  # in the others the model may run more than once
        # Once a forward, though the head's gradient needs the weight too; the first step records the order.
        forwards = dict(case.options).get("gradient_accumulation_steps", 1)
        assert ours["gathers"][-1] == forwards, ours["gathers"]
    if wrapping == "zero2":
        assert not any(ours["gathers"])


def test_every_case_runs_somewhere() -> None:
    assert {name for names in ON_CPU.values() for name in names} == {n for n, case in CASES.items() if not case.device}
    assert SPREAD.keys() == WRAPPINGS.keys() - {"single"} == ON_CPU.keys()
