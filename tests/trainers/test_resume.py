"""A run that is killed goes on from its last checkpoint to the same losses."""

import os
import signal

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from liger_trainer.trainers.checkpoints.moving_reference import REFERENCE_FILE
from liger_trainer.trainers.checkpoints.resuming import CheckpointError
from tests import forked
from tests.tiny_models import TINY_MODELS
from tests.trainers.builders import causal
from tests.trainers.parity import assert_close_weights, build, save_models
from tests.trainers.tiny import COMMON, llama

ARGUMENTS = {
    **COMMON, "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2, "lr_scheduler_type": "cosine",
}  # fmt: skip


class KillAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def run(output_dir, kill_at=None, resume=None):
    callbacks = [] if kill_at is None else [KillAt(kill_at)]
    trainer = causal(output_dir, llama(attention_dropout=0.1), callbacks=callbacks, **ARGUMENTS)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    return {log["step"]: (log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("kill_at", [3, 4, 5])
def test_resumes_to_the_same_losses_and_weights(kill_at, whole, tmp_path):
    if kill_at == 3:  # the real thing, once
        assert forked.run(run, tmp_path, kill_at).returncode == -signal.SIGKILL
    else:

        class StopAt(TrainerCallback):
            def on_step_begin(self, args, state, control, **kwargs):
                if state.global_step == kill_at:
                    raise KeyboardInterrupt

        trainer = causal(tmp_path, llama(attention_dropout=0.1), callbacks=[StopAt()], **ARGUMENTS)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert get_last_checkpoint(str(tmp_path)).endswith(f"checkpoint-{kill_at // 2 * 2}")
    resumed = run(tmp_path, resume=True)
    expected, got = losses(whole), losses(resumed)
    assert set(got) == set(expected)
    for step in expected:
        assert got[step] == pytest.approx(expected[step], abs=1e-6)
    assert_close_weights(resumed, whole, tolerance=1e-6)


def experts_trainer(output_dir):
    return causal(output_dir, TINY_MODELS["qwen3_moe"](), **{**ARGUMENTS, "max_steps": 4})


def test_resumes_with_the_experts_of_the_checkpoint(tmp_path):
    """transformers saves them one by one, and its Trainer finds none of those names in the model."""
    whole = experts_trainer(tmp_path / "whole")
    whole.train()
    resumed = experts_trainer(tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert losses(resumed) == losses(whole)
    assert_close_weights(resumed, whole, tolerance=0)


def test_the_best_model_has_the_experts_of_its_checkpoint(tmp_path):
    trainer = experts_trainer(tmp_path)
    trainer.train()
    trainer.state.best_model_checkpoint = best = str(tmp_path / "checkpoint-2")
    trainer._load_best_model()  # what `load_best_model_at_end` calls
    expected = type(trainer.model).from_pretrained(best)
    for (name, a), b in zip(expected.named_parameters(), trainer.model.parameters()):
        assert torch.equal(a, b), name


def linear(output_dir, max_steps, **settings):
    return causal(output_dir, **{**ARGUMENTS, "lr_scheduler_type": "linear", "max_steps": max_steps, **settings})


def test_a_longer_schedule_has_its_own_rate_from_the_first_step_on(tmp_path):
    linear(tmp_path, 4).train()
    longer = linear(tmp_path, 8)
    longer.train(resume_from_checkpoint=True)
    rates = [log["learning_rate"] for log in longer.state.log_history if "learning_rate" in log]
    assert rates[4:] == pytest.approx([1e-2 * (8 - step) / 8 for step in (4, 5, 6, 7)])


@pytest.mark.parametrize("max_steps", [6, 5])
def test_a_run_that_has_made_its_steps_makes_no_more(max_steps, tmp_path):
    """The checkpoint is in the midst of an epoch, whose next batch the Trainer would take."""
    constant = {"lr_scheduler_type": "constant"}
    done = linear(tmp_path, 6, **constant)
    done.train()
    again = linear(tmp_path, max_steps, **constant)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert_close_weights(again, done, tolerance=0)


def test_a_path_is_checked_as_text_is(tmp_path):
    linear(tmp_path, 2).train()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is damaged"):
        linear(tmp_path, 4).train(resume_from_checkpoint=tmp_path / "checkpoint-2")


def test_a_reference_model_that_moves_and_was_not_saved(tmp_path, caplog):
    """As in the checkpoint of a stock trainer."""
    folder = save_models(tmp_path)["llama"]
    moving = {**ARGUMENTS, "max_steps": 2, "sync_ref_model": True, "ref_model_sync_steps": 1}
    build("DPO", True, tmp_path / "run", folder, **moving).train()
    (tmp_path / "run" / "checkpoint-2" / REFERENCE_FILE).unlink()
    build("DPO", True, tmp_path / "run", folder, **{**moving, "max_steps": 3}).train(resume_from_checkpoint=True)
    assert "holds no reference model: the one that `sync_ref_model` updates starts again" in caplog.text
