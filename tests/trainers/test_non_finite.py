"""A guarded trainer saves finite weights, and logs losses as they were."""

import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from liger_trainer.callbacks.non_finite import NonFiniteError
from liger_trainer.trainers.trainer import LigerTrainer
from tests.trainers.builders import causal


class OverflowAt(TrainerCallback):
    """At this step, the learning rate makes an update of finite gradients infinite."""

    def __init__(self, step):
        self.step = step

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step + 1 == self.step:
            for group in optimizer.param_groups:
                group["lr"] = 3e38


class NaNLossAt2(LigerTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        return loss * math.nan if self.state.global_step == 1 else loss


def build(folder, trainer_class=LigerTrainer, **options):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, **options}
    return causal(folder, trainer_class=trainer_class, **options)


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_an_update_that_overflows_is_not_saved(action, tmp_path):
    """At the step of a save, so that no later loss shows it."""
    trainer = build(tmp_path, callbacks=[OverflowAt(4)], non_finite=action)
    with pytest.raises(NonFiniteError) as raised:
        trainer.train()
    assert "Stopped at step 4: parameter 'model." in str(raised.value)
    assert f"{str(tmp_path / 'checkpoint-2')!r} is the last good checkpoint" in str(raised.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "report.html"]
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in saved.values())


def test_a_good_checkpoint_is_not_replaced(tmp_path):
    build(tmp_path, max_steps=2).train()
    good = (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes()
    with pytest.raises(NonFiniteError, match="Stopped at step 2"):
        build(tmp_path, callbacks=[OverflowAt(2)]).train()
    assert (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes() == good


@pytest.mark.parametrize("action", ["stop", "off"])
def test_save_model(action, tmp_path):
    trainer = build(tmp_path, non_finite=action)
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = math.nan
    if action == "off":
        trainer.save_model(str(tmp_path / "model"))
        return
    with pytest.raises(NonFiniteError, match=r"parameter 'model\.norm\.weight' is not finite.*holds no checkpoint"):
        trainer.save_model(str(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_a_broken_base_model_is_named_before_it_is_trained(tmp_path):
    trainer = build(tmp_path)
    with torch.no_grad():
        trainer.model.model.embed_tokens.weight[0, 0] = math.inf  # the row of the padding: no loss would tell
    with pytest.raises(NonFiniteError, match=r"Stopped before step 1: parameter 'model\.embed_tokens\.weight'"):
        trainer.train()


@pytest.mark.parametrize("action", ["stop", "skip", "off"])
def test_a_loss_that_is_nan_is_logged_as_nan(action, tmp_path):
    trainer = build(tmp_path, NaNLossAt2, non_finite=action, save_strategy="no")
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert [math.isnan(loss) for loss in losses[:2]] == [False, True]
    if action == "skip":
        assert len(losses) == 4
        assert all(math.isfinite(loss) for loss in losses[2:])
