"""The real trainers under `accelerate launch` with the shipped configurations train as the stock trainer alone does.

On a machine with GPUs every case runs with NCCL in every wrapping; elsewhere a part of them runs with gloo.
`-s` prints a table.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed.accelerate_cases import CASES, STEPS, VOCAB, WRAPPINGS
from tests.distributed.accelerate_launch import Launches, on_gpus, outcome, relative, together
from tests.distributed.accelerate_zero3 import HAS_DEEPSPEED
from tests.distributed.matrix_models import build_model
from tests.once import shared_folder

TOLERANCE = 2e-4
"""Of losses and gradient norms relative to themselves, of each parameter to the way it went, in fp32."""
GPU_TOLERANCE = 1e-3
"""As above: the kernels sum in another order than cuBLAS."""
BF16_TOLERANCE = 5e-2
"""Of losses and gradient norms in bf16, which DeepSpeed also keeps weights in: a step is less than their rounding."""

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
_TWO_UNITS = "accelerate gives embedding and head, which share the rows, a unit each; our trainers refuse it"
_LEAVES = "PEFT makes a unit of each trained matrix, and reads what is outside of it; our trainers refuse it"
_BROKEN_GRAPHS = "the hooks of an owner break every graph"
LEFT_OUT = {
    **{("fsdp1", name): _FSDP1_REFERENCE for name in ("dpo, lora", "dpo, lora with head")},
    **{(wrapping, "compiled"): _BROKEN_GRAPHS for wrapping in ("fsdp1", "zero2", "zero3")},
    **{(wrapping, "trainer, tied token rows"): _TWO_UNITS for wrapping in ("fsdp2", "fsdp2 kept", "hsdp")},
    ("fsdp1", "sft, dora with head"): _LEAVES,
    **{(wrapping, "compiled"): "compiled as fsdp2" for wrapping in ("fsdp2 kept", "hsdp")},
}

ON_CPU: dict[str, tuple[str, ...]] = {
    "ddp": ("use_kernels", "use_kernels, lora"),
    "fsdp1": (
        *("trainer, tied token rows", "trainer, full", "sft, tied head", "dpo, full", "grpo, lora", "short last"),
        *("checkpointed", "evaluated", "sampled"),
    ),
    "fsdp2": (
        *("sft, full", "sft, lora", "sft, lora with head", "trainer, lora with head", "dpo, lora", "grpo, full"),
        *("accumulated", "a rank without labels", "clipped", "checkpointed, reentrant", "sft, dora with head"),
        *("sft, modules to save", "sft, token rows", "trainer, frozen head", "kept", "evaluated", "sampled, lora"),
        *("use_kernels", "use_kernels, lora", "use_kernels, dpo", "dpo, full"),
    ),
    "fsdp2 kept": (),
    "hsdp": (),
    "zero2": ("trainer, tied head", "trainer, lora", "accumulated", "means of ranks", "kept, sft"),
    "zero3": (
        *("trainer, full", "trainer, tied head", "sft, lora with head", "a rank without labels, sft", "dpo, full"),
        *("dpo, lora with head", "accumulated, sft", "sft, dora with head", "sft, modules to save"),
        *("trainer, frozen head", "kept", "evaluated", "evaluated between", "evaluated between, dpo", "sampled"),
    ),
}
"""What runs where there are no GPUs: every case that can, once at least.

`matrix.py` crosses more of torch's own ways, `test_mesh_gloo.py` has HSDP on four processes, and
`tests/trainers/test_two_processes.py` trains with DDP.
"""


def _cases(wrapping: str) -> list[str]:
    if not on_gpus():
        return list(ON_CPU[wrapping])
    return [name for name in CASES if (wrapping, name) not in LEFT_OUT]


ALL = [(wrapping, name) for wrapping in SPREAD for name in _cases(wrapping)]
if not HAS_DEEPSPEED:
    ALL = [(wrapping, name) for wrapping, name in ALL if not wrapping.startswith("zero")]


class Runs:
    """The launches of the cases that were selected."""

    def __init__(self, folder: Path, selected: list[tuple[str, str]]) -> None:
        self.launches, self.selected = Launches(folder), selected
        wrappings = dict.fromkeys(["single", *(where for where, _ in selected)])
        together([partial(self.of, wrapping) for wrapping in wrappings])

    def of(self, wrapping: str) -> Path:
        """The folder of a launch."""
        chosen = dict.fromkeys(name for where, name in self.selected if wrapping in (where, "single"))
        names = [name for name in chosen if wrapping != "single" or not CASES[name].of_wrapping]
        return self.launches.once(wrapping, "accelerate_worker", *names)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    chosen = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    selected = [(each["wrapping"], each["name"]) for each in chosen if {"wrapping", "name"} <= each.keys()]
    with shared_folder(tmp_path_factory, "accelerate") as folder:
        return Runs(folder, [pair for pair in selected if pair in ALL])


@pytest.mark.parametrize(("wrapping", "name"), ALL)
def test_trains_as_the_stock_trainer_alone(wrapping: str, name: str, runs: Runs) -> None:
    case = CASES[name]
    folder = runs.of(wrapping)
    ours, weights = outcome(folder / f"{name}.ours")
    wanted, after = outcome((folder if case.of_wrapping else runs.of("single")) / f"{name}.stock")
    in_bf16 = bool(dict(case.options).get("bf16"))
    tolerance = BF16_TOLERANCE if in_bf16 else GPU_TOLERANCE if on_gpus() else TOLERANCE
    errors = {
        key: relative(torch.tensor(ours[key]), torch.tensor(wanted[key]))
        for key in ("loss", "grad_norm", *(["evaluation"] if case.evaluated else []))
        if any(wanted[key])  # GRPO's loss is zero
    }
    if not in_bf16:
        before = {
            path: each.detach()
            for path, each in build_model(case.parameters, vocab_size=VOCAB).named_parameters()
            if each.requires_grad
        }
        errors["weights"] = max(relative(weights[path], after[path], start) for path, start in before.items())
    print(f"{wrapping:11} {name:28}", *(f"{key} {value:.1e}" for key, value in errors.items()), ours["gathers"])
    assert max(errors.values()) <= tolerance, errors
    assert ours["spread"] == SPREAD[wrapping]
    assert ours["samples"] == wanted["samples"]
    assert len(ours["samples"]) == (STEPS + 1 if case.sampled else 0)
    runs_once = case.trainer in ("trainer", "sft") and not case.sampled  # samples count too
    if wrapping == "zero3" and runs_once:
        # Once for the forward and its loss, once for the backward, unless the weight lies under an adapter; the first
        # step records the order.
        times = 1 if case.parameters in ("lora with head", "dora with head", "token rows") else 2
        forwards = dict(case.options).get("gradient_accumulation_steps", 1)
        assert ours["gathers"][-1] == times * forwards, ours["gathers"]
    if wrapping == "zero2":
        assert not any(ours["gathers"])


def test_every_case_runs_somewhere() -> None:
    assert {name for names in ON_CPU.values() for name in names} == {n for n, case in CASES.items() if not case.device}
    assert SPREAD.keys() == WRAPPINGS.keys() - {"single"} == ON_CPU.keys()
