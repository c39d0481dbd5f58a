"""How often the host waits for the device in a micro-batch: `docs/guides/cuda-graphs.md` has the numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from liger_trainer.head import forward, on_host
from liger_trainer.kernels.copied_rows import copies_of
from liger_trainer.kernels.documents import documents_of
from liger_trainer.trainers import generation_trainers, reference_trainers, reward_trainer, sft_trainer, step
from liger_trainer.trainers.step import KnownBatches, add_facts
from tests.trainers.parity import KINDS as KINDS_OF_DATA
from tests.trainers.parity import build, lora, results_of_processes
from tests.trainers.tiny import llama, logged, tokenizer
from tests.trainers.waits import HostWaits, copied

pytestmark = pytest.mark.filterwarnings("ignore")

MODULES = (generation_trainers, reference_trainers, reward_trainer, sft_trainer)
KINDS = ("SFT", "DPO", "KTO", "GRPO", "RLOO", "Reward")
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "cuda-graphs.md"


def of_last_micro_batch(trainer: Any) -> HostWaits:
    """The waits of the last micro-batch of a training, in which nothing is generated."""
    training_step, found = trainer.training_step, []

    def counted(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        models = [model, getattr(trainer, "ref_model", None)]
        weights = [[*each.parameters(), *each.buffers()] for each in models if each is not None]
        with HostWaits(weights, inputs, getattr(trainer, "_buffered_inputs", None)) as waits:
            loss = training_step(model, inputs, *args, **kwargs)
        found.append(waits)
        return loss

    trainer.training_step = counted
    trainer.train()
    return found[-1]


def waits_of(kind: str, ours: bool, folder: Any, model: Any, monkeypatch: Any, **case: Any) -> HostWaits:
    """Those of TRL's trainer, or of ours, whose metrics wait to be read as on a device."""
    for module in MODULES:
        monkeypatch.setattr(module, "may_defer", lambda trainer: True)
    # On a CPU, `Tensor.cpu` copies nothing.
    monkeypatch.setattr(generation_trainers, "on_host", lambda tensor, _: on_host.on_host(tensor, copied(tensor)))
    settings = {"max_steps": 2, "logging_steps": 2, "gradient_accumulation_steps": 2, **case}
    return of_last_micro_batch(build(kind, ours, folder, model, **settings))


def documented() -> dict[str, list[int]]:
    """The rows of the table of waits: a micro-batch of TRL, and of ours."""
    section = GUIDE.read_text().partition("## What a step costs the host")[2]
    rows = re.findall(r"^\| `Liger(\w+)Trainer` \| (\d+) \| (\d+) \|", section, re.MULTILINE)
    return {kind: [int(each) for each in numbers] for kind, *numbers in rows}


@pytest.mark.parametrize("kind", KINDS)
def test_a_micro_batch_waits_as_often_as_documented(kind, tmp_path, folders, monkeypatch):
    case = {} if kind in ("SFT", "Reward") else {"own": {"padding_free": True}}
    theirs, ours = (waits_of(kind, each, tmp_path, folders["llama"], monkeypatch, **case) for each in (False, True))
    # Masks of padded rows, which transformers reads on a CPU, are plans of our attention on a GPU.
    counts = [sum(each.found.values()) - each.of("transformers") for each in (theirs, ours)]
    assert counts == documented()[kind], (theirs.found, ours.found)


@pytest.mark.parametrize("kind", ["DPO", "KTO", "GRPO", "RLOO"])
@pytest.mark.parametrize(
    "case",
    [
        {"own": {"padding_free": False}},
        {"own": {"padding_free": True, "tokens_per_micro_batch": 60}},
        {"peft_config": lora()},
    ],
    ids=["padded", "several rows", "adapters"],
)
def test_nothing_else_waits(kind, case, tmp_path, folders, monkeypatch):
    waits = waits_of(kind, True, tmp_path, folders["llama"], monkeypatch, **case)
    assert waits.of("trl") == waits.of("liger_trainer") == 0, waits.found


@pytest.mark.parametrize(("kind", "forwards"), [("KTO", 4), ("GRPO", 1), ("RLOO", 1)])
def test_lengths_of_padded_rows_are_known(kind, forwards, tmp_path, folders, monkeypatch):
    """Those of forwards whose mask is not the batch's too: our attention makes its plan of them."""
    read, rows_of = [], forward.rows_of

    def noted(*args: Any) -> Any:
        read.append(rows_of(*args))
        return read[-1]

    monkeypatch.setattr(forward, "rows_of", noted)
    waits_of(kind, True, tmp_path, folders["llama"], monkeypatch, own={"padding_free": False})
    assert all(rows is not None and rows.bounds for rows in read[-forwards:])


def batch() -> dict[str, torch.Tensor]:
    ids, mask = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]]), torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    return {"input_ids": ids, "attention_mask": mask, "completion_mask": torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])}


def test_values_stay_those_of_the_batch():
    """A collator may write the next batch to the same memory; the batch itself may be changed, or another one."""
    collated = batch()
    add_facts(collated)
    copied_to_device = {name: each.clone() if name in batch() else each for name, each in collated.items()}
    for name in batch():
        collated[name].zero_()
    known = KnownBatches()
    known.take([copied_to_device])
    for name, each in known.on_host(copied_to_device).items():
        assert on_host.values_of(each).tolist() == batch()[name].tolist()
    copied_to_device["input_ids"].add_(1)
    other = {**copied_to_device, "attention_mask": batch()["attention_mask"]}
    found = known.on_host(other)
    assert [on_host.values_of(each) is not None for each in found.values()] == [False, False, True]


def test_a_known_count_is_not_awaited(monkeypatch):
    class OnCuda(on_host.OnHost):
        is_cuda = True

    count = on_host.on_host(torch.tensor(7), torch.tensor(7))
    count.__class__ = OnCuda
    monkeypatch.setattr(step, "CountOnDevice", None)
    assert step.count_later(count)() == 7


def test_tables_of_packed_rows_are_sent_without_waiting():
    with HostWaits() as waits:
        documents_of([3, 4], device="cpu")
        copies_of(torch.tensor([0, 1, 1]), 2, "cpu")
    assert not waits.found


def with_one_bad_answer(n: int = 16) -> Dataset:
    return Dataset.from_list([{**row, "label": place != 5} for place, row in enumerate(KINDS_OF_DATA["KTO"][0](n))])


def work(folder: Any) -> None:
    """Logs on two processes, where metrics wait to be read and where they do not."""
    logs: dict[str, list[Any]] = {}
    for kind in ("DPO", "KTO", "GRPO", "RLOO"):
        for deferred in (True, False):
            for module in MODULES:
                module.may_defer = lambda trainer, deferred=deferred: deferred
            settings = {"max_steps": 5, "logging_steps": 1, "per_device_train_batch_size": 2}
            if kind == "KTO":
                settings["data"] = with_one_bad_answer
            trainer = build(kind, True, f"{folder}/{kind}", f"{folder}/model", **settings)
            trainer.train()
            own = [{name: each for name, each in log.items() if "step_time" not in name} for log in logged(trainer)]
            logs.setdefault(kind, []).append(own)
    Path(folder, f"rank{trainer.args.process_index}.json").write_text(json.dumps(logs))


def test_logs_of_two_processes_are_the_same(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    for logs in results_of_processes(work, tmp_path):
        for deferred, read in logs.values():
            assert deferred == read
        some_have_no_bad_answers = {"rewards/margins" in log for log in logs["KTO"][0] if "loss" in log}
        assert len(some_have_no_bad_answers) == 2
