"""A checkpoint that cannot be resumed from is one line: the file, what is wrong with it, and the one before it."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model

from liger_trainer.trainers.adapter_methods import TRAINED_FILE
from liger_trainer.trainers.checkpoints.moving_reference import REFERENCE_FILE
from liger_trainer.trainers.checkpoints.resuming import CheckpointError, damage
from tests.trainers.builders import causal
from tests.trainers.test_checkpoints import FILES, build
from tests.trainers.tiny import llama


def adapters():
    return get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


def trainer_of(model, folder):
    return causal(folder, model, save_strategy="steps", save_steps=1, max_steps=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of four steps: of a whole model, and of adapters."""
    folder = tmp_path_factory.mktemp("trained")
    build(folder / "whole", max_steps=4, save_total_limit=None).train()
    trainer_of(adapters(), folder / "adapters").train()
    return folder


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained / "whole", tmp_path, dirs_exist_ok=True)
    return tmp_path


def resume(folder, checkpoint=True, **settings):
    trainer = build(folder, **{"max_steps": 5, "save_total_limit": None, **settings})
    trainer.train(resume_from_checkpoint=checkpoint if checkpoint is True else str(checkpoint))
    return trainer


@pytest.mark.parametrize("size", [0, 100, -1])
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_cut_short(file, size, run):
    path = run / "checkpoint-4" / file
    path.write_bytes(path.read_bytes()[:size])
    if file == "trainer_state.json" and size == -1:
        path.write_bytes(path.read_bytes()[:-1])  # its last byte ends a line
    with pytest.raises(CheckpointError) as raised:
        resume(run, run / "checkpoint-4")
    message = str(raised.value)
    assert str(path) in message
    assert f"Resume from {str(run / 'checkpoint-2')!r}" in message
    assert "\n" not in message
    assert resume(run, run / "checkpoint-2").state.global_step == 5


@pytest.mark.parametrize("file", [REFERENCE_FILE, TRAINED_FILE])
def test_a_file_of_ours_that_is_cut_short(file, run):
    path = run / "checkpoint-4" / file
    torch.save({"weight": torch.ones(100)}, path)
    assert damage(path.parent) is None
    path.write_bytes(path.read_bytes()[:100])
    assert damage(path.parent) == f"{str(path)!r} is cut short"


def test_the_one_before_it_is_whole(run):
    for step in (2, 4):
        (run / f"checkpoint-{step}" / "optimizer.pt").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"checkpoint-4/optimizer\.pt' is cut short\. There is none before it"):
        resume(run)


def test_a_shard_that_is_missing(run):
    checkpoint = run / "checkpoint-4"
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors' is missing"):
        resume(run)


@pytest.mark.parametrize(
    ("lost", "warning"),
    [
        (["optimizer.pt"], "the optimizer and the learning rate schedule start again"),
        (["scheduler.pt"], "the optimizer and the learning rate schedule start again"),
        (["rng_state.pth"], "random numbers will differ"),
        (["optimizer.pt", "scheduler.pt", "rng_state.pth"], "start again, and random numbers"),
    ],
)
def test_state_that_is_lost_is_a_warning(lost, warning, run, caplog):
    for file in lost:
        (run / "checkpoint-4" / file).unlink()
    assert resume(run).state.global_step == 5
    (line,) = [record.getMessage() for record in caplog.records if "holds no" in record.getMessage()]
    assert "checkpoint-4 holds no " in line
    assert all(file in line for file in lost)
    assert warning in line


def test_adapters_from_a_whole_model_and_the_reverse(trained, tmp_path):
    with pytest.raises(CheckpointError, match=r"one of a whole model \('.*model\.safetensors'\).*`use_peft: false`"):
        trainer_of(adapters(), tmp_path).train(resume_from_checkpoint=str(trained / "whole" / "checkpoint-2"))
    with pytest.raises(CheckpointError, match=r"one of adapters \('.*adapter_model\.safetensors'\).*`use_peft: true`"):
        trainer_of(llama(), tmp_path).train(resume_from_checkpoint=str(trained / "adapters" / "checkpoint-1"))
    trainer_of(adapters(), tmp_path).train(resume_from_checkpoint=str(trained / "adapters" / "checkpoint-1"))


def test_another_model(trained, tmp_path):
    with pytest.raises(CheckpointError, match=r"does not fit this run: .*size mismatch for"):
        trainer_of(llama(hidden_size=16), tmp_path).train(
            resume_from_checkpoint=str(trained / "whole" / "checkpoint-2")
        )


def test_arguments_that_the_checkpoint_overrules_are_one_warning(run, caplog):
    resume(run, learning_rate=5e-4, weight_decay=0.3, adam_beta2=0.9, save_steps=5, logging_steps=2)
    (line,) = [record.getMessage() for record in caplog.records if "uses the values" in record.getMessage()]
    assert "`learning_rate` is 0.01, not 0.0005" in line
    assert "`weight_decay` is 0.0, not 0.3" in line
    assert "`adam_beta1, adam_beta2` is (0.9, 0.999), not (0.9, 0.9)" in line
    assert "`save_steps` is 2, not 5" in line
    assert "`logging_steps` is 1, not 2" in line
    assert line.count("`learning_rate`") == 1


def test_overruled_arguments_have_no_effect(run):
    trainer = resume(run, learning_rate=5e-4, weight_decay=0.3, lr_scheduler_type="constant", max_steps=6)
    assert [log["learning_rate"] for log in trainer.state.log_history if log["step"] == 6 and "loss" in log] == [1e-2]
    assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.0}


def test_the_same_arguments_are_not_mentioned(run, caplog):
    trainer = resume(run)
    assert trainer.state.global_step == 5
    assert "uses the values" not in caplog.text
    assert "holds no" not in caplog.text
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_a_checkpoint_of_another_optimizer(optimizer, run):
    """torch loads its state, and fails in the first step."""
    with pytest.raises(CheckpointError, match=r"does not fit this run: its optimizer has no '.*'\. Resume with the"):
        resume(run, optim=optimizer)
