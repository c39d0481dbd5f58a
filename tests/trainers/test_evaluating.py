"""The mean loss of an evaluation is over the batches that have one."""

import math

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.builders import causal, sft
from tests.trainers.tiny import llama, token_rows


def of_the_model(folder, rows, trainer_class=LigerTrainer):
    return causal(folder, trainer_class=trainer_class, eval_dataset=rows, per_device_eval_batch_size=2)


def of_trl(folder, rows):
    data = Dataset.from_list([{key: row[key].tolist() for key in ("input_ids", "labels")} for row in rows])
    options = {"per_device_eval_batch_size": 2, "dataset_kwargs": {"skip_prepare_dataset": True}}
    return sft(folder, data=data, eval_dataset=data, **options)


def without_labels(rows, *which):
    return [
        {**row, "labels": torch.full_like(row["labels"], -100)} if i in which else row for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize("build", [of_the_model, of_trl])
def test_a_batch_without_a_label_is_left_out_with_a_warning(build, tmp_path, caplog):
    rows = token_rows(6)
    expected = build(tmp_path, rows[:2] + rows[4:]).evaluate()["eval_loss"]
    assert "no finite loss" not in caplog.text
    trainer = build(tmp_path, without_labels(rows, 2, 3))
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert "1 of the 3 batches evaluated here have no finite loss" in caplog.text
    assert trainer.args.logging_nan_inf_filter is False


def test_as_the_stock_trainer(tmp_path):
    rows = without_labels(token_rows(6), 0, 1)
    stock = of_the_model(tmp_path, rows, Trainer).evaluate()
    assert of_the_model(tmp_path, rows).evaluate()["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-6)


def test_no_label_at_all_is_no_loss_of_zero(tmp_path):
    trainer = of_the_model(tmp_path, without_labels(token_rows(2), 0, 1))
    assert math.isnan(trainer.evaluate()["eval_loss"])


def test_a_user_may_log_what_is_no_number_before_training(tmp_path):
    trainer = of_the_model(tmp_path, token_rows(2))
    trainer.log({"loss": math.nan})
    trainer.log({"loss": "none yet"})
    assert len(trainer.state.log_history) == 2


@pytest.mark.parametrize("build", [of_the_model, of_trl])
@pytest.mark.parametrize("half", ["bf16_full_eval", "fp16_full_eval"])
def test_an_evaluation_in_half_precision_leaves_the_weights(build, half, tmp_path):
    """The Trainer casts the model for good, so that a training after it would be in half precision."""
    trainer = build(tmp_path, token_rows(4))
    setattr(trainer.args, half, True)
    model = trainer.model
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    seen = []
    hook = model.register_forward_pre_hook(lambda module, *_: seen.append(module.lm_head.weight.dtype))
    trainer.evaluate()
    hook.remove()
    assert set(seen) == {torch.bfloat16 if half == "bf16_full_eval" else torch.float16}
    after = dict([*model.named_parameters(), *model.named_buffers()])
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
        assert after[name].dtype == tensor.dtype
    trainer.train()
    assert trainer.model.lm_head.weight.dtype == torch.float32
    trainer.predict(trainer.eval_dataset)
    assert trainer.model.lm_head.weight.dtype == torch.float32


def test_a_tied_weight_is_restored_once(tmp_path):
    trainer = causal(
        tmp_path, llama(tie_word_embeddings=True), eval_dataset=token_rows(4), bf16_full_eval=True, max_steps=1
    )
    trainer.evaluate()
    head, embedding = trainer.model.lm_head.weight, trainer.model.model.embed_tokens.weight
    assert head is embedding
    assert head.dtype == torch.float32
    assert trainer.model.model.rotary_emb.inv_freq.dtype == torch.float32
