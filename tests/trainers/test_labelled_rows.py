"""Every trainer multiplies the rows with a label alone, and trains as with all rows."""

from __future__ import annotations

import contextlib
import functools
import random

import pytest
import torch
from datasets import Dataset
from transformers import BatchEncoding

from liger_trainer.head import fused_loss
from liger_trainer.head.step import Step
from liger_trainer.trainers import generation_trainers
from liger_trainer.trainers import step as trainer_step
from liger_trainer.trainers.base import LigerTrainerMixin
from liger_trainer.trainers.reference_trainers import LigerDPOTrainer
from liger_trainer.trainers.step import CountOnDevice, KnownBatches, add_facts, labels_of_parts
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.builders import causal, dpo
from tests.trainers.parity import build, lora
from tests.trainers.test_parity_distillation import build as build_distillation
from tests.trainers.test_parity_distillation import student
from tests.trainers.tiny import llama, logged, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")

PADDED = {"padding_free": False}  # a packed row has the rows with a label alone, however many


@pytest.fixture(autouse=True)
def _few_rows_are_worth_it(monkeypatch):
    """Tiny batches have far fewer tokens than 512."""
    monkeypatch.setattr(fused_loss, "_ROW_MULTIPLE", 4)


@pytest.fixture
def chosen(monkeypatch):
    """Of every loss over the head that leaves rows out: how many there were, had a label and were kept."""
    seen = []
    original = fused_loss.rows_with_label

    def spy(kept, target, ignore_index, logits_memory):
        seen.append((target.numel(), int((target != ignore_index).sum()), kept))
        return original(kept, target, ignore_index, logits_memory)

    monkeypatch.setattr(fused_loss, "rows_with_label", spy)
    return seen


@pytest.fixture
def on_device(monkeypatch):
    """The counts that were not known to the host."""
    seen = []
    original = trainer_step.count_later

    def spy(count):
        seen.append(int(count))
        return original(count)

    for module in (trainer_step, generation_trainers):
        monkeypatch.setattr(module, "count_later", spy)
    return seen


def without_bounds(monkeypatch):
    """All rows, as before."""
    monkeypatch.setattr(LigerTrainerMixin, "_counts_labels", False)
    monkeypatch.setattr(generation_trainers, "count_later", lambda count: None)


def few_labels(length=20):
    """Rows whose last three tokens have a label."""
    rows = token_rows(length=length)
    return [{**row, "labels": row["labels"].index_fill(0, torch.arange(length - 3), -100)} for row in rows]


def trained(make, monkeypatch=None):
    """A trainer after its training; with all rows if `monkeypatch` is given."""
    with contextlib.nullcontext() if monkeypatch is None else monkeypatch.context() as patch:
        if patch is not None:
            without_bounds(patch)
        trainer = make()
        torch.manual_seed(5)
        random.seed(5)
        trainer.train()
    return trainer


def assert_trains_alike(make, monkeypatch, chosen):
    """Every logged number; returns the trainer that left rows out."""
    ours = trained(make)
    assert chosen, "all rows were multiplied"
    assert all(count <= kept < total for total, count, kept in chosen)
    left_out = len(chosen)
    native = trained(make, monkeypatch)
    assert len(chosen) == left_out, "this run was to multiply all rows"
    for left, right in zip(logged(ours), logged(native), strict=True):
        assert left.keys() == right.keys()
        for key in left.keys() - {"step_time"}:
            assert left[key] == pytest.approx(right[key], rel=2e-4, abs=2e-5, nan_ok=True), key
    return ours


CAUSAL = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "smoothing": {"label_smoothing_factor": 0.1},
    "workers": {"dataloader_num_workers": 1},
}


@pytest.mark.parametrize("case", CAUSAL)
def test_batches_of_the_collator(case, tmp_path, monkeypatch, chosen, on_device):
    options = {"bf16": False, "rows": few_labels(), **CAUSAL[case]}
    assert_trains_alike(lambda: causal(tmp_path, **options), monkeypatch, chosen)
    assert not on_device, "the collator knew the labels"
    size = options.get("per_device_train_batch_size", 4)
    assert {total for total, _, _ in chosen} == {20 * size}
    assert max(kept for _, _, kept in chosen) <= 3 * size + 3


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("SFT", {"data": "completions"}),
        ("SFT", {"data": "completions", "loss_type": "dft"}),
        ("SFT", {"data": "completions", "label_smoothing_factor": 0.2}),
        ("SFT", {"data": "completions", "peft_config": lora("q_proj", "lm_head")}),
        ("SFT", {"data": "completions", "packing": True, "max_length": 48}),
        ("DPO", {}),
        ("DPO", {"peft_config": lora("q_proj", "lm_head")}),
        ("DPO", {"use_weighting": True}),
        ("KTO", {}),
        ("KTO", {"model": "gemma2"}),
    ],
)
def test_trl_trainers_whose_labels_the_collator_knows(kind, case, folders, tmp_path, monkeypatch, chosen, on_device):
    model = folders[case.get("model", "llama")]
    case = {key: value for key, value in case.items() if key != "model"}
    if kind != "SFT":
        case["own"] = PADDED
    assert_trains_alike(lambda: build(kind, True, tmp_path, model, **case), monkeypatch, chosen)
    assert not on_device


@pytest.mark.parametrize(
    ("kind", "case"), [("GRPO", "plain"), ("GRPO", "reference"), ("GRPO", "lora"), ("RLOO", "tight")]
)
def test_trl_trainers_that_generate(kind, case, folders, tmp_path, monkeypatch, chosen, on_device):
    options = {
        "plain": {"beta": 0.0},
        "reference": {"beta": 0.1, "steps_per_generation": 2, "num_iterations": 2, "max_steps": 4},
        "tight": {"beta": 0.0, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        "lora": {"beta": 0.1, "peft_config": lora("q_proj", "lm_head")},
    }[case]
    make = functools.partial(build, kind, True, tmp_path, folders["llama"], own=PADDED, **options)
    assert_trains_alike(make, monkeypatch, chosen)
    assert on_device
    most = {total: max(count for same, count, _ in chosen if same == total) for total, _, _ in chosen}
    assert all(kept < most[total] + 4 for total, _, kept in chosen), "the bound is that of the fullest forward"


def often_done():
    """A student whose completions end early, so that some of their positions are padding."""
    model = student()
    with torch.no_grad():
        model.lm_head.weight[model.config.eos_token_id] *= 8
    return model


@pytest.mark.parametrize(
    ("kind", "case", "known"),
    [
        ("gkd", {}, True),
        ("gkd", {"lmbda": 1.0}, False),
        ("gkd", {"peft": ["q_proj", "lm_head"]}, True),
        ("distillation", {"model": often_done}, False),
    ],
)
def test_distillation(kind, case, known, tmp_path, monkeypatch, chosen, on_device):
    assert_trains_alike(lambda: build_distillation(kind, True, tmp_path, **case), monkeypatch, chosen)
    assert bool(on_device) is not known


@pytest.mark.parametrize("kind", ["ORPO", "CPO"])
def test_trainers_that_log_the_logits_of_every_position(kind, folders, tmp_path, chosen):
    """Every position is scored, so no row is left out."""
    trainer = build(kind, True, tmp_path, folders["llama"])
    trainer.train()
    assert not chosen
    assert all(log["loss"] == log["loss"] for log in trainer.state.log_history if "loss" in log)


def test_evaluation_multiplies_all_rows(tmp_path, chosen):
    trainer = causal(tmp_path, rows=few_labels(), eval_dataset=few_labels())
    trainer.evaluate()
    assert not chosen
    batch = next(iter(trainer.get_train_dataloader()))  # as a user may look at it
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    trainer.train()
    assert chosen


def test_a_bound_that_is_too_low_is_named_by_the_guard(tmp_path, monkeypatch, chosen):
    monkeypatch.setattr(trainer_step, "most_labels", lambda labels: torch.tensor(4))
    trainer = causal(tmp_path, rows=few_labels(), non_finite="skip")
    trainer.train()
    assert all(count > kept for _, count, kept in chosen)
    assert len(trainer._guard.findings) == 3
    assert all("the loss (nan)" in finding for finding in trainer._guard.findings)


def test_a_loss_function_of_the_user_gets_all_rows(tmp_path, chosen):
    """It may score tokens that are not in the labels."""

    def of_all_tokens(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits
        return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.clamp(min=0).view(-1))

    trainer = causal(tmp_path, rows=few_labels(), compute_loss_func=of_all_tokens)
    trainer.train()
    assert not chosen
    assert not trainer._guard.findings


def test_a_loss_of_a_subclass_gets_all_rows(tmp_path, chosen):
    class OverPrompts(LigerDPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            everything = {**inputs, "completion_mask": inputs["attention_mask"]}
            return super()._compute_loss(model, everything, return_outputs)

    trainer = dpo(tmp_path, llama(), trainer_class=OverPrompts)
    trainer.train()
    assert not chosen
    assert not trainer._guard.findings


@pytest.mark.parametrize("in_place", [False, True])
def test_labels_that_were_changed_are_counted_again(in_place, tmp_path, on_device, chosen):
    class Unmasking(LigerTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if in_place:
                inputs["labels"].copy_(inputs["input_ids"])
            else:
                inputs["labels"] = inputs["labels"].where(inputs["labels"] != -100, 5)
            return super().compute_loss(model, inputs, *args, **kwargs)

    trainer = causal(tmp_path, trainer_class=Unmasking, rows=few_labels())
    trainer.train()
    assert on_device == [80] * 3
    assert not chosen, "all have a label now"
    assert not trainer._guard.findings


@pytest.mark.parametrize("streamed", [False, True])
def test_batches_that_accelerate_dispatches(streamed, tmp_path, chosen, on_device):
    """Such a loader can split nothing but tensors, so the device counts."""
    rows = [{name: tensor.tolist() for name, tensor in row.items()} for row in few_labels()]
    data = Dataset.from_list(rows)
    data = data.to_iterable_dataset() if streamed else data
    options = {} if streamed else {"accelerator_config": {"dispatch_batches": True, "split_batches": True}}
    collate = lambda rows: {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}  # noqa: E731
    trainer = causal(tmp_path, rows=data, data_collator=collate, **options)
    trainer.train()
    assert len(on_device) == 3
    assert len(chosen) == 3


def test_what_users_collate():
    labels = torch.tensor([[-100, 3, 4], [-100, -100, 5]])
    for kind in (dict, BatchEncoding):
        batch = kind({"labels": labels})
        add_facts(batch)
        assert batch[trainer_step._KEY].labels == 3

    class Own(dict):
        def __setitem__(self, key, value):
            raise TypeError("it is fixed")

    untouched = [
        [labels], labels, Own(labels=labels), {"labels": torch.tensor([1, 0])}, {"labels": torch.rand(2, 3)},
        {"labels": None}, {"labels": labels.to("meta")}, {"chosen_labels": labels}, None,
        {"attention_mask": torch.ones(2, 0)}, {"attention_mask": torch.ones(2, 1, 3, 3)},
    ]  # fmt: skip
    for batch in untouched:
        add_facts(batch)
        assert not hasattr(batch, "keys") or trainer_step._KEY not in batch


def test_the_larger_count_bounds_every_forward(on_device):
    batch = {"completion_mask": torch.tensor([[0, 1, 1]]), "KL_completion_mask": torch.tensor([[1, 1, 1]])}
    add_facts(batch)
    assert batch[trainer_step._KEY].labels == 3
    bounds = KnownBatches()
    bounds.take([batch])
    assert trainer_step._KEY not in batch
    assert bounds.added_to(Step(), dict(batch), count_labels=True).labelled() == 3
    assert not on_device
    bounds.added_to(Step(), {**batch, "completion_mask": torch.ones(1, 3)}, count_labels=True)
    assert on_device == [3]


@pytest.mark.parametrize(("rows", "most"), [(None, 7), (3, 7), (2, 5), (1, 4)])
def test_forwards_of_some_rows_each(rows, most):
    mask = torch.tensor([[0, 1, 0, 0, 0], [0, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    assert labels_of_parts(mask, rows) == most


def test_a_count_on_the_device_is_waited_for_once():
    happened = []

    class Event:
        def record(self):
            happened.append("recorded")

        def synchronize(self):
            happened.append("waited")

    count = CountOnDevice(torch.tensor(7), Event)
    assert happened == ["recorded"]
    assert [count(), count()] == [7, 7]
    assert happened == ["recorded", "waited"]
