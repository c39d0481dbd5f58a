"""A checkpoint appears when all of it is written; what comes in between leaves the one before."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerState
from transformers.trainer_utils import get_last_checkpoint

from liger_trainer.trainers.checkpoints.whole import complete_checkpoints, put_in_place, room_in
from liger_trainer.trainers.trainer import LigerTrainer
from tests import forked
from tests.trainers.builders import causal
from tests.trainers.parity import assert_close_weights
from tests.trainers.parity import build as build_trl
from tests.trainers.tiny import COMMON, llama, token_rows

SETTINGS = {**COMMON, "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
FILES = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


def build(folder, trainer_class=LigerTrainer, **settings):
    return causal(folder, trainer_class=trainer_class, eval_dataset=token_rows(n=4), **{**SETTINGS, **settings})


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def die_while_writing(file):
    """From here on, this process writes half of `file` of the second checkpoint and is killed."""
    save, save_to_json = torch.save, TrainerState.save_to_json

    def until(path):
        if str(path).endswith(f"checkpoint-4/{file}"):
            Path(path).write_bytes(b'{"' * 50)
            os.kill(os.getpid(), signal.SIGKILL)

    def half_save(data, path, *args, **kwargs):
        until(path)
        save(data, path, *args, **kwargs)

    def half_save_to_json(self, path):
        until(path)
        save_to_json(self, path)

    torch.save, TrainerState.save_to_json = half_save, half_save_to_json


def train_until(file, folder):
    die_while_writing(file)
    build(folder).train()


@pytest.mark.parametrize("file", ["optimizer.pt", "trainer_state.json"])
def test_killed_while_writing(file, tmp_path):
    """`checkpoint-2` is the last one, also to Hugging Face's own search, and `save_total_limit: 1` has left it."""
    assert forked.run(train_until, file, tmp_path).returncode == -signal.SIGKILL
    assert any((tmp_path / "_incomplete" / "checkpoint-4").iterdir())
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")
    trainer = build(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-6"]
    whole = build(tmp_path / "whole")
    whole.train()
    assert_close_weights(trainer, whole, tolerance=0)


def test_the_new_one_is_kept_where_the_clock_of_old_ones_is_ahead(tmp_path):
    """A host whose clock is an hour ahead has saved the first ones; a run on another host goes on."""
    build(tmp_path, max_steps=4, save_total_limit=None).train()
    for number, name in enumerate(names(tmp_path)):
        date = (tmp_path / name).stat().st_mtime + 3600 + 10 * number
        os.utime(tmp_path / name, (date, date))
    build(tmp_path, max_steps=8, save_total_limit=2).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-8"]


@pytest.fixture
def small_disk():
    """Files end at 40 kB, as on a disk that is full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_room_is_that_of_the_folder_which_may_be_a_disk_of_its_own(tmp_path, monkeypatch):
    asked = []
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage(path))
    room_in(tmp_path)
    room_in(tmp_path / "not" / "there")
    assert asked == [tmp_path, tmp_path]


def test_a_full_disk_is_an_error_and_leaves_the_good_checkpoint(tmp_path, small_disk):
    class FullAtStep4(LigerTrainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            if self.state.global_step == 4:
                small_disk()
            super()._save_optimizer_and_scheduler(output_dir)

    trainer = build(tmp_path, FullAtStep4)
    with pytest.raises(OSError, match=r"checkpoint-4 could not be written \(.+\): [\d,.]+ MiB were free") as raised:
        trainer.train()
    assert str(tmp_path / "checkpoint-4") in str(raised.value)
    assert names(tmp_path) == ["checkpoint-2"]
    assert set(FILES) <= {path.name for path in (tmp_path / "checkpoint-2").iterdir()}


def test_another_error_while_saving_stays_what_it_is(tmp_path):
    class Broken(LigerTrainer):
        def _save_rng_state(self, output_dir):
            raise ArithmeticError("a mistake in a subclass")

    with pytest.raises(ArithmeticError, match="a mistake in a subclass"):
        build(tmp_path, Broken).train()
    assert get_last_checkpoint(tmp_path) is None


def test_checkpoints_are_those_of_the_stock_trainer(tmp_path):
    """Files, names, limit and best checkpoint; the loss falls, so that the last is the best."""
    settings = {"save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    ours = build(tmp_path / "ours", **settings)
    stock = build(tmp_path / "stock", Trainer, **settings)
    for trainer in (ours, stock):
        trainer.train()
    assert names(tmp_path / "ours") == names(tmp_path / "stock")
    for name in names(tmp_path / "stock"):
        theirs = {path.name for path in (tmp_path / "stock" / name).iterdir()}
        assert {path.name for path in (tmp_path / "ours" / name).iterdir()} == theirs
        best = [
            json.loads((tmp_path / whose / name / "trainer_state.json").read_text())["best_model_checkpoint"]
            for whose in ("ours", "stock")
        ]
        assert best[0] == best[1].replace("/stock/", "/ours/")
    assert ours.state.best_model_checkpoint == stock.state.best_model_checkpoint.replace("/stock/", "/ours/")


def test_the_best_checkpoint_outlives_the_limit(tmp_path):
    class Rising(LigerTrainer):
        def evaluate(self, *args, **kwargs):
            metrics = {"eval_loss": float(self.state.global_step)}
            self.log(metrics)
            return metrics

    settings = {"save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = build(tmp_path, Rising, **settings)
    trainer.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    saved = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    torch.testing.assert_close(trainer.model.state_dict()["lm_head.weight"], saved["lm_head.weight"])


def test_a_checkpoint_of_an_earlier_run_is_replaced_whole(tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "of_another_run.pt").write_bytes(b"old")
    build(tmp_path, max_steps=2).train()
    assert names(tmp_path) == ["checkpoint-2"]
    assert {path.name for path in (tmp_path / "checkpoint-2").iterdir()} >= set(FILES)
    assert not (tmp_path / "checkpoint-2" / "of_another_run.pt").exists()


@pytest.fixture
def killed_between_renames(tmp_path, monkeypatch):
    """A run in `tmp_path` that ends when the checkpoint of an earlier run has lost its name, and its own has none."""
    build(tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "of_another_run.pt").write_bytes(b"old")
    rename = Path.rename

    def until(path, target):
        if Path(target) == tmp_path / "checkpoint-2":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", until)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path).train()
    assert names(tmp_path) == ["_incomplete"]
    return tmp_path


@pytest.mark.parametrize("by_name", [False, True])
def test_resuming_after_a_kill_between_the_renames(by_name, killed_between_renames):
    folder = killed_between_renames
    trainer = build(folder, max_steps=3)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if by_name else True)
    assert not (folder / "checkpoint-2" / "of_another_run.pt").exists()
    assert trainer.state.global_step == 3


def test_the_next_save_after_a_kill_between_the_renames(killed_between_renames):
    build(killed_between_renames, save_steps=1, max_steps=1, save_total_limit=2).train()
    assert names(killed_between_renames) == ["checkpoint-1", "checkpoint-2"]
    assert {path.name for path in (killed_between_renames / "checkpoint-2").iterdir()} >= set(FILES)


def test_an_interrupted_checkpoint_does_not_replace_one_that_is_there(tmp_path):
    for folder in (tmp_path / "_incomplete" / "checkpoint-2.whole", tmp_path / "checkpoint-2"):
        folder.mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps(folder.name))
    assert complete_checkpoints(tmp_path) == [tmp_path / "checkpoint-2"]
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text()) == "checkpoint-2"


def test_of_machines_that_share_the_folder_one_renames(tmp_path):
    staged, final = tmp_path / "_incomplete" / "checkpoint-2", tmp_path / "checkpoint-2"
    staged.mkdir(parents=True)
    (staged / "model").write_text("whole")
    put_in_place(staged, final)
    put_in_place(staged, final)
    assert (final / "model").read_text() == "whole"
    assert names(tmp_path) == ["checkpoint-2"]


def test_the_hub_is_given_the_checkpoint_under_its_name(tmp_path, monkeypatch):
    pushed = []

    def push(self, folder):
        pushed.append((Path(folder), set(os.listdir(folder))))

    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, *args, **kwargs: None)
    build(tmp_path, push_to_hub=True, max_steps=4, save_total_limit=None).train()
    assert [folder for folder, _ in pushed] == [tmp_path / "checkpoint-2", tmp_path / "checkpoint-4"]
    assert all(set(FILES) <= files for _, files in pushed)


def test_resuming_passes_over_what_a_stock_trainer_left_half_written(tmp_path, caplog):
    stock = build(tmp_path, Trainer, max_steps=2)
    stock.train()
    (tmp_path / "checkpoint-4").mkdir()
    (tmp_path / "checkpoint-4" / "model.safetensors").write_bytes(b"\0" * 100)
    assert get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    trainer = build(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-4 is not complete" in caplog.text
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [1, 2, 3, 4, 5, 6]


def test_resuming_from_nothing(tmp_path):
    with pytest.raises(ValueError, match="holds no complete checkpoint"):
        build(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_the_trainers_of_trl_too(name, tmp_path):
    """Each writes more than the Trainer does (a model card, a state of its own), before or after it."""
    llama().save_pretrained(tmp_path / "model")
    settings = {**SETTINGS, "max_steps": 2, "save_steps": 1, "own": {}}
    trainer = build_trl(name, True, str(tmp_path / "run"), str(tmp_path / "model"), **settings)
    whole = []
    save_rng_state = trainer._save_rng_state

    def looks_around(output_dir):
        save_rng_state(output_dir)
        whole.append(get_last_checkpoint(tmp_path / "run"))

    trainer._save_rng_state = looks_around
    trainer.train()
    assert whole == [None, str(tmp_path / "run" / "checkpoint-1")]  # while the first and the second were written
    assert names(tmp_path / "run") == ["checkpoint-2"]
