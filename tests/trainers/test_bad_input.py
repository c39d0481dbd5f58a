"""Bad input ends in an error that says what to do, or in a right result."""

import pytest
import torch
from transformers import DataCollatorWithPadding, TrainingArguments

from liger_trainer.callbacks.non_finite import NonFiniteGuardCallback
from liger_trainer.configs.training_arguments import LigerTrainingArguments
from liger_trainer.trainers.checks.batches import CheckedCollator, checked_collator
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.tiny import COMMON, llama, token_rows


def build(tmp_path, rows, model=None, **kwargs):
    args = LigerTrainingArguments(output_dir=str(tmp_path), **{**COMMON, **kwargs})
    return LigerTrainer(model or llama(), args, train_dataset=rows)


def test_label_beyond_the_vocabulary(tmp_path):
    rows = token_rows()
    for row in rows:
        row["labels"][5] = 128
    with pytest.raises(ValueError, match=r"`labels` holds 128.*vocabulary has 128 entries.*0 to 127"):
        build(tmp_path, rows).train()


def test_label_beyond_the_vocabulary_in_a_worker(tmp_path):
    rows = token_rows()
    for row in rows:
        row["labels"][5] = 500
    with pytest.raises(ValueError, match="`labels` holds 500"):
        build(tmp_path, rows, dataloader_num_workers=1).train()


def test_negative_label_that_is_not_the_ignored_one(tmp_path):
    rows = token_rows()
    for row in rows:
        row["labels"][5] = -1
    with pytest.raises(ValueError, match="`labels` holds -1"):
        build(tmp_path, rows).train()


def test_token_beyond_the_embedding(tmp_path):
    rows = token_rows()
    for row in rows:
        row["input_ids"][5] = 200
    with pytest.raises(ValueError, match=r"`input_ids` holds 200.*resize_token_embeddings"):
        build(tmp_path, rows).train()


def test_check_leaves_good_batches_and_other_models_alone():
    batch = {"labels": torch.tensor([[-100, 0, 9]]), "input_ids": torch.tensor([[0, 1, 2]])}
    assert CheckedCollator(lambda features: features, 10, 3)(batch) is batch
    collator = DataCollatorWithPadding
    assert checked_collator(collator, torch.nn.Linear(2, 2)) is collator


def test_all_labels_ignored(tmp_path):
    rows = token_rows()
    for row in rows:
        row["labels"][:] = -100
    trainer = build(tmp_path, rows)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert losses == [0.0, 0.0, 0.0]
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters()))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_labels_ignored_backpropagates(smoothing, tmp_path):
    trainer = build(tmp_path, token_rows(), label_smoothing_factor=smoothing)
    batch = dict(next(iter(trainer.get_train_dataloader())))
    batch["labels"] = torch.full_like(batch["labels"], -100)
    loss = trainer.compute_loss(trainer.model.train(), batch, num_items_in_batch=torch.tensor(0))
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in trainer.model.parameters())


def test_nan_in_the_input_is_named(tmp_path):
    class NaNEmbeddings(LigerTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            if self.state.global_step == 1:
                ids = inputs.pop("input_ids")
                inputs["inputs_embeds"] = model.get_input_embeddings()(ids) * float("nan")
            return super().compute_loss(model, inputs, *args, **kwargs)

    args = LigerTrainingArguments(output_dir=str(tmp_path), **COMMON)
    trainer = NaNEmbeddings(llama(), args, train_dataset=token_rows())
    trainer.train()
    (guard,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, NonFiniteGuardCallback)]
    assert "Step 2: the loss (nan) is not finite" in guard.findings[0]
    assert trainer.state.global_step == 2
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())


def test_model_on_the_meta_device(tmp_path):
    with torch.device("meta"):
        model = llama()
    with pytest.raises(ValueError, match=r"meta device, such as 'model.embed_tokens.weight'.*to_empty"):
        build(tmp_path, token_rows(), model)


def test_rows_without_labels(tmp_path):
    rows = [{key: value for key, value in row.items() if key != "labels"} for row in token_rows()]
    with pytest.raises(ValueError, match="did not return a loss"):
        build(tmp_path, rows).train()


def test_data_parallel_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(ValueError, match=r"nn.DataParallel.*accelerate launch"):
        build(tmp_path, token_rows())


def test_unknown_kernel(tmp_path):
    with pytest.raises(ValueError, match=r"no key 'rop'; did you mean 'rope'\?"):
        build(tmp_path, token_rows(), liger_kernel_config={"rop": True})
