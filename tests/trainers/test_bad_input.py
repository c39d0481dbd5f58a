"""Bad input ends in an error that says what to do, or in a right result."""

import pytest
import torch
from transformers import DataCollatorWithPadding, TrainingArguments

from liger_trainer.trainers.step import CheckedCollator, checked_collator
from tests.trainers.builders import causal
from tests.trainers.tiny import llama, token_rows


def spoilt(column, value):
    rows = token_rows()
    for row in rows:
        row[column][5] = value
    return rows


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (128, r"`labels` holds 128.*vocabulary has 128 entries.*0 to 127"),
        (-1, "`labels` holds -1"),
    ],
)
def test_label_beyond_the_vocabulary(value, message, workers, tmp_path):
    with pytest.raises(ValueError, match=message):
        causal(tmp_path, rows=spoilt("labels", value), dataloader_num_workers=workers).train()


def test_token_beyond_the_embedding(tmp_path):
    with pytest.raises(ValueError, match=r"`input_ids` holds 200.*resize_token_embeddings"):
        causal(tmp_path, rows=spoilt("input_ids", 200)).train()


def test_check_leaves_good_batches_and_other_models_alone():
    batch = {"labels": torch.tensor([[-100, 0, 9]]), "input_ids": torch.tensor([[0, 1, 2]])}
    assert CheckedCollator(lambda features: features, 10, 3)(batch) is batch
    collator = DataCollatorWithPadding
    assert checked_collator(collator, torch.nn.Linear(2, 2)) is collator


def test_all_labels_ignored(tmp_path):
    rows = token_rows()
    for row in rows:
        row["labels"][:] = -100
    trainer = causal(tmp_path, rows=rows)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses == [0.0, 0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_labels_ignored_backpropagates(smoothing, tmp_path):
    trainer = causal(tmp_path, label_smoothing_factor=smoothing)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=torch.tensor(0))
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


def test_model_on_the_meta_device(tmp_path):
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match=r"meta device, such as 'model.embed_tokens.weight'.*to_empty"):
        causal(tmp_path, model)


def test_rows_without_labels(tmp_path):
    rows = [{key: value for key, value in row.items() if key != "labels"} for row in token_rows()]
    with pytest.raises(ValueError, match="did not return a loss"):
        causal(tmp_path, rows=rows).train()


def test_data_parallel_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"nn.DataParallel.*accelerate launch"):
        causal(tmp_path)


def test_unknown_kernel(tmp_path):
    with pytest.raises(ValueError, match=r"no key 'rop'; did you mean 'rope'\?"):
        causal(tmp_path, liger_kernel_config={"rop": True})
