"""Rows that are filled up to one of a few lengths train the same, and their layers run from few graphs."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from liger_trainer.packing.layout import filled_length
from liger_trainer.trainers.filling import FillingCollator, take_filled, without_filling
from tests.trainers.builders import causal, sft
from tests.trainers.test_activation_memory import lora
from tests.trainers.test_cuda_graphs import recorded  # noqa: F401
from tests.trainers.tiny import llama, mixtral, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")


def test_lengths_are_few_and_no_more_than_6_percent_longer():
    lengths = range(1, 20_000)
    assert all(length <= filled_length(length) < 1.06 * length for length in lengths)
    assert all(filled_length(filled_length(length)) == filled_length(length) for length in lengths)
    assert len({filled_length(length) for length in range(4096, 8192)}) <= 33
    assert [filled_length(length) for length in (33, 70, 100, 1000, 4097)] == [33, 72, 100, 1024, 4224]


def rows(lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each.clone()} for each in ids]


def padded(features):
    longest = max(len(each["input_ids"]) for each in features)
    values = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = torch.nn.functional.pad
    return {
        name: torch.stack([pad(each[name], (0, longest - len(each[name])), value=value) for each in features])
        for name, value in values.items()
    }


LENGTHS = [length for step in range(12) for length in (90 + step % 6, 60, 30 + step, 20)]  # 90 to 95 become 92 and 96


@pytest.mark.parametrize("make", [llama, lora, mixtral])
@pytest.mark.usefixtures("recorded")
def test_losses_are_the_same_to_rounding(make, tmp_path):
    trainers = []
    for graphs in (True, False):
        options = {"cuda_graphs": graphs, "max_steps": 12, "data_collator": padded, "learning_rate": 0.0}
        options["train_sampling_strategy"] = "sequential"
        trainers.append(causal(tmp_path, make(), rows=rows(LENGTHS), **options))
        trainers[-1].train()
    one, other = (each.state.log_history for each in trainers)
    for mine, theirs in zip(one, other, strict=True):
        for name in ("loss", "grad_norm"):
            assert name not in mine or mine[name] == pytest.approx(theirs[name], rel=1e-5), name
        assert mine.get("labelled_share") == theirs.get("labelled_share")
    kinds = [len(known.graphs) for known in trainers[0]._graphs._of.values()]
    assert kinds == ([0, 0] if make is mixtral else [2, 2])
    assert trainers[0]._throughput._run_tokens == trainers[1]._throughput._run_tokens == sum(LENGTHS)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("workers", [0, 1])
def test_processes_that_collate_see_what_keeps_the_device_busy(workers, tmp_path):
    trainer = causal(tmp_path, llama(), cuda_graphs="auto", max_steps=1, dataloader_num_workers=workers)
    trainer.train()
    assert trainer._graphs.gains.busy_from.is_shared() == (workers > 0)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("packed", [False, True])
def test_metrics_of_trl_are_the_same(packed, tmp_path):
    data = Dataset.from_list([{"input_ids": (torch.arange(length) % 120 + 3).tolist()} for length in LENGTHS])
    logs = []
    for graphs in (True, False):
        options = {"cuda_graphs": graphs, "max_steps": 12, "learning_rate": 0.0}
        options |= {"train_sampling_strategy": "sequential", "padding_free": packed, "max_length": None}
        names = tokenizer()
        names.pad_token = names.eos_token  # another id than 0
        options |= {"processing_class": names, "include_num_input_tokens_seen": "non_padding"}
        trainer = sft(tmp_path, llama(), data=data, **options)
        trainer.train()
        logs.append(trainer.state.log_history)
        kinds = [len(known.graphs) for known in trainer._graphs._of.values()] if graphs else []
        assert kinds == ([2, 2] if graphs else [])
        assert trainer._throughput._run_tokens == sum(LENGTHS)
    for mine, theirs in zip(*logs, strict=True):
        for name in ("num_tokens", "num_input_tokens_seen", "mean_token_accuracy", "labelled_share"):
            assert mine.get(name) == theirs.get(name)
        for name in ("loss", "entropy", "grad_norm"):
            assert name not in mine or mine[name] == pytest.approx(theirs[name], rel=1e-5), name


def filled(batch, most=None, busy_from=1 << 40):
    return FillingCollator(lambda features: dict(batch), most, True, torch.tensor([busy_from]))([])


def test_only_what_is_known_to_be_padded_on_the_right_is_filled():
    whole = torch.ones(2, 70, dtype=torch.long)
    mask = whole.clone()
    mask[0, 60:] = 0
    batch = {"input_ids": whole, "attention_mask": mask, "labels": whole, "ref_logps": torch.zeros(2)}
    more = filled(batch)
    for name, value in {"input_ids": 0, "attention_mask": 0, "labels": -100}.items():
        assert more[name].shape == (2, 72)
        assert torch.equal(more[name][:, :70], batch[name])
        assert (more[name][:, 70:] == value).all()
    assert filled({**batch, "attention_mask": mask.flip(1)})["input_ids"].shape == (2, 70)
    assert filled({**batch, "position_ids": whole})["input_ids"].shape == (2, 70)
    assert filled({**batch, "labels": whole[:, :1]})["input_ids"].shape == (2, 70)
    assert filled({"input_ids": whole, "labels": whole})["input_ids"].shape == (2, 70)
    assert filled({"input_ids": whole, "attention_mask": mask, "labels": whole[0]})["input_ids"].shape == (2, 70)
    assert filled(batch, most=71)["input_ids"].shape == (2, 70)
    assert filled(batch, most=72)["input_ids"].shape == (2, 72)
    assert filled(batch, busy_from=145)["input_ids"].shape == (2, 72)
    assert filled(batch, busy_from=144)["input_ids"].shape == (2, 70)  # a graph would gain nothing
    assert FillingCollator(lambda features: features, None, True, torch.tensor([1 << 40]))([1]) == [1]


def test_a_packed_row_gets_a_document_more():
    positions = torch.cat([torch.arange(40), torch.arange(30)])[None]
    ids, starts = torch.arange(70)[None], torch.tensor([0, 40, 70], dtype=torch.int32)
    batch = {
        "input_ids": ids, "labels": ids, "position_ids": positions, "cu_seq_lens_q": starts, "cu_seq_lens_k": starts,
        "max_length_q": 40, "max_length_k": 40, "seq_idx": (positions == 0).cumsum(1, dtype=torch.int32) - 1,
    }  # fmt: skip
    more = filled(batch)
    assert take_filled(more) == 2
    assert take_filled(more) == 0
    assert more["input_ids"][0, 68:].tolist() == [68, 69, 0, 0]
    assert more["labels"][0, 68:].tolist() == [68, 69, -100, -100]
    assert more["position_ids"][0, 68:].tolist() == [28, 29, 0, 1]
    assert more["seq_idx"][0, 68:].tolist() == [1, 1, 2, 2]
    assert more["cu_seq_lens_q"].tolist() == more["cu_seq_lens_k"].tolist() == [0, 40, 70, 72]
    assert more["max_length_q"] == 40
    assert {name: without_filling(more, 2)[name].shape for name in ("input_ids", "labels")} == {
        "input_ids": (1, 70),
        "labels": (1, 70),
    }
    for other in ({"position_ids": positions + 1}, {"input_ids": ids.repeat(2, 1)}, {"pixel_values": ids}):
        assert filled({**batch, **other})["labels"].shape == (1, 70)
