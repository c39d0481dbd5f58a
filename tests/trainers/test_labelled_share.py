"""What the logs say of the tokens: a rate in every trainer, the share with a label, and a batch that has none."""

import json
import logging
import math
import os
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import BertConfig, BertForTokenClassification, T5Config, T5ForConditionalGeneration

import liger_trainer
from liger_trainer.callbacks.labelled_share import LabelledShareCallback, token_masks
from tests.trainers.builders import causal, sft
from tests.trainers.parity import build as build_trl
from tests.trainers.parity import results_of_processes
from tests.trainers.test_parity_distillation import TRAINERS as DISTILLATIONS
from tests.trainers.test_parity_distillation import build as build_distillation
from tests.trainers.test_stock_after_ours import EVERY_KIND, trained
from tests.trainers.tiny import completion_dataset, text_dataset, token_rows

pytestmark = pytest.mark.filterwarnings("ignore")

IN_ORDER = {"train_sampling_strategy": "sequential"}


def without_labels(rows, *indices):
    return [
        {**row, "labels": torch.full_like(row["labels"], -100)} if i in indices else row for i, row in enumerate(rows)
    ]


def build(tmp_path, rows, **options):
    return causal(tmp_path, rows=rows, **IN_ORDER, **options)


def share_of(rows):
    return sum(int(row["labels"].ne(-100).sum()) for row in rows) / sum(
        int(row["attention_mask"].sum()) for row in rows
    )


def losses(trainer):
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_share_of_every_log_and_of_the_run(logging_steps, tmp_path):
    rows = token_rows(16)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    trainer = build(tmp_path, rows, logging_steps=logging_steps, **options)
    trainer.train()
    size = 4 * logging_steps
    expected = [share_of(rows[i : i + size]) for i in range(0, 16, size)]
    assert [log["labelled_share"] for log in losses(trainer)] == pytest.approx(expected, abs=1e-4)
    assert trainer.state.log_history[-1]["train_labelled_share"] == pytest.approx(share_of(rows), abs=1e-4)


def test_a_batch_without_a_label_is_one_warning_with_its_step(tmp_path, caplog):
    """The second micro-batch of the second step, where a log comes after the fourth alone; then many more."""
    rows = without_labels(token_rows(16), 6, 7, 10, 11, 14, 15)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 4}
    build(tmp_path, rows, **options).train()
    warned = [record.getMessage() for record in caplog.records if "without a label" in record.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith(
        "Step 2 has a micro-batch without a label, which trains nothing: all of its labels are -100"
    )


def test_the_first_step_is_looked_at_at_once(tmp_path, caplog):
    trainer = build(tmp_path, without_labels(token_rows(16), *range(4)), logging_steps=1000, max_steps=3)
    seen = []

    class Look(liger_trainer.callbacks.logged.LoggedMetricsCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            seen.append("Step 1 has a micro-batch without a label" in caplog.text)

    trainer.add_callback(Look())
    trainer.train()
    assert seen == [False, True, True]


def test_labels_everywhere_are_no_warning(tmp_path, caplog):
    build(tmp_path, token_rows(16)).train()
    assert "without a label" not in caplog.text


def test_a_label_of_the_first_token_alone_trains_nothing(tmp_path, caplog):
    rows = without_labels(token_rows(8), *range(8))
    for row in rows:
        row["labels"][0] = row["input_ids"][0]
    build(tmp_path, rows, max_steps=1).train()
    assert "Step 1 has a micro-batch without a label" in caplog.text


def tagger():
    config = BertConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=128, num_labels=128
    )
    return BertForTokenClassification(config)


def seq2seq():
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 128}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


@pytest.mark.parametrize(("model", "share"), [(tagger, 0.1), (seq2seq, None)])
def test_a_loss_that_predicts_no_next_token(model, share, tmp_path, caplog):
    """A label of the first token is trained on; those of an encoder-decoder are no labels of the encoder's tokens."""
    rows = [{key: row[key] for key in ("input_ids", "labels")} for row in without_labels(token_rows(8), *range(8))]
    for row in rows:
        row["labels"][0] = 5
    trainer = causal(tmp_path, model(), rows=rows, max_steps=1)
    trainer.train()
    assert "without a label" not in caplog.text
    assert losses(trainer)[0].get("labelled_share") == share
    assert math.isfinite(trainer.evaluate(rows)["eval_loss"])  # a batch without a label would have none


def test_sft_names_max_length_that_has_cut_the_answers_off(tmp_path, caplog):
    def collate(rows):  # TRL's own preparation drops such rows
        batch = {key: torch.stack([torch.as_tensor(row[key][:6]) for row in rows]) for key in rows[0]}
        return {**batch, "labels": torch.full_like(batch["input_ids"], -100)}

    rows = Dataset.from_list([{k: row[k].tolist() for k in ("input_ids", "attention_mask")} for row in token_rows(8)])
    rows = rows.map(lambda row: {"attention_mask": [1] * 10})
    options = {"max_length": 6, "dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    trainer = sft(tmp_path, data=rows, data_collator=collate, **options)
    trainer.train()
    assert "its rows fill `max_length=6`, which may have cut off the answers. Increase `max_length`" in caplog.text
    assert losses(trainer)[0]["labelled_share"] == 0.0


@pytest.mark.parametrize("kind", [*EVERY_KIND, *DISTILLATIONS])
def test_every_trainer_logs_its_tokens(kind, tmp_path, folders):
    if kind in DISTILLATIONS:
        trainer = build_distillation(kind, True, tmp_path)
        trainer.train()
    else:
        trainer = trained(kind, True, folders["llama"], tmp_path)
    for log in losses(trainer):
        assert log["tokens_per_second"] > 0
        assert ("labelled_share" in log) == (kind != "Reward")
        assert 0 < log.get("labelled_share", 0.5) <= 1
    assert trainer.state.log_history[-1]["train_tokens_per_second"] > 0


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_generated_tokens_are_those_that_are_trained_on(kind, tmp_path, folders):
    trainer = build_trl(kind, True, tmp_path / "out", folders["llama"], own={"kernel_report": False})
    tokens, labels = [], []
    compute_loss = trainer.compute_loss

    def counting(model, inputs, *args, **kwargs):
        labels.append(int(inputs["completion_mask"].sum()))
        tokens.append(int(inputs["prompt_mask"].sum()) + labels[-1])
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = counting
    trainer.train()
    assert trainer._throughput._run_tokens == sum(tokens)
    share = sum(labels) / sum(tokens)
    assert trainer.state.log_history[-1]["train_labelled_share"] == pytest.approx(share, abs=1e-4)


def test_masks_of_the_kinds_of_batches():
    ones = torch.ones(2, 4, dtype=torch.int64)
    labels = torch.tensor([[-100, 5, 6, 7], [-100, -100, 5, 6]])
    padded = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])

    def counts(batch):
        return [(int(t.sum()), None if m is None else int(m.sum())) for t, m in token_masks(batch)]

    assert counts({"input_ids": ones, "labels": labels}) == [(8, 5)]
    assert counts({"input_ids": ones, "labels": labels, "attention_mask": padded}) == [(7, 4)]  # not of padding
    assert counts({"input_ids": ones, "attention_mask": padded, "completion_mask": padded}) == [(7, 7)]
    assert counts({"input_ids": ones, "labels": torch.tensor([0, 1])}) == [(8, None)]  # of a classifier
    pair = {
        f"{side}_{name}": value
        for side in ("chosen", "rejected")
        for name, value in (("input_ids", ones), ("labels", labels))
    }
    assert counts(pair) == [(8, 5), (8, 5)]
    answered = {"prompt_mask": padded, "completion_mask": ones}
    assert counts(answered) == [(15, 8)]
    assert counts({**answered, "tool_mask": padded}) == [(15, 7)]
    assert counts([{"prompt": "a"}]) == []


def two_processes(output_dir):
    # Rows go to the processes in turns of two: the second process's first micro-batch of step 2 is without a label.
    rows = without_labels(token_rows(16), 10, 11)
    logging.basicConfig(filename=f"{output_dir}/warnings{os.environ['RANK']}.txt", force=True)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "logging_steps": 2}
    trainer = build(output_dir, rows, **options)
    trainer.train()
    Path(output_dir, f"rank{trainer.args.process_index}.json").write_text(json.dumps(losses(trainer)[0]))


def test_two_processes(tmp_path):
    shares = [result["labelled_share"] for result in results_of_processes(two_processes, tmp_path)]
    expected = share_of(without_labels(token_rows(16), 10, 11))
    assert shares == pytest.approx([expected, expected], abs=1e-4)
    warned = [
        (tmp_path / f"warnings{rank}.txt").read_text().count("Step 2 has a micro-batch without") for rank in range(2)
    ]
    assert warned == [1, 0]


def test_counting_never_waits_for_the_device(monkeypatch):
    """On a GPU any of these would."""
    for name in ("item", "tolist", "__bool__", "__int__", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name, **__: pytest.fail(name))
    callback = LabelledShareCallback()
    ones = torch.ones(2, 4, dtype=torch.int64)
    for step in (1, 2):
        callback.count([{"input_ids": ones, "labels": ones, "attention_mask": ones}], step)


def test_texts_and_completions_differ_in_their_share(tmp_path):
    shares = []
    for rows in (text_dataset(), completion_dataset()):
        trainer = sft(tmp_path, data=rows)
        trainer.train()
        shares.append(trainer.state.log_history[-1]["train_labelled_share"])
    assert shares[0] == 1.0
    assert 0.2 < shares[1] < 0.8
