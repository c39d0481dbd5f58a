"""Runs that end before their last step: by signals, numbers that are not finite, another run, or a full disk."""

import math
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from liger_trainer.tools.cli import main, run_recipe_file
from liger_trainer.trainers.checkpoints.whole import LOCK, owned
from tests import forked
from tests.tools.cli.runs import EIGHT_STEPS, checkpoints, logged, message_of, state, weights, write_recipe

SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return write_recipe("mine.yaml", {**EIGHT_STEPS, "output_dir": "run"})


def sent_at(step, numbers, path, *options, ignored=(), rank="0"):
    """A run whose process, or one rank, gets these signals during a step."""
    from liger_trainer.callbacks import stop_on_signal
    from liger_trainer.trainers.trainer import LigerTrainer

    training_step = LigerTrainer.training_step

    def with_signals(self, *args, **kwargs):
        if self.state.global_step + 1 == step and os.environ.get("RANK", "0") == rank:
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(0.05)
        return training_step(self, *args, **kwargs)

    LigerTrainer.training_step = with_signals
    if len(numbers) > 1 and numbers[0] == numbers[1]:
        stop_on_signal._REPEATED_WITHIN = 0.01
    for number in SIGNALS:  # whatever the tests inherit, from nohup for one
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    return run_recipe_file(path, options)


def nohup(path):
    return sent_at(3, [signal.SIGHUP], path, ignored=[signal.SIGHUP])


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_after_its_step_and_it_continues(number, recipe, tmp_path):
    done = forked.run(sent_at, 3, [number], recipe, "--save_strategy", "no", cwd=tmp_path)
    assert done.returncode == 128 + number, done.stderr[-3000:]
    name = number.name
    assert f"{name}: stops after this step, with a checkpoint; once more ends it at once.\n" in done.stderr
    last = message_of(done.stderr)
    assert last.startswith(f"liger-trainer: stopped by {name} at step 3; checkpoint-3 is saved; the same command with")
    assert checkpoints(tmp_path / "run") == ["checkpoint-3"]
    assert not (tmp_path / "run" / "model.safetensors").exists()  # which would look like a finished run
    assert main(["train", recipe, "--resume_from_checkpoint", "true"]) == 0
    assert main(["train", recipe, "--output_dir", "whole"]) == 0
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")
    assert weights("run") == weights("whole")


def test_ctrl_c_reaches_the_workers_of_a_data_loader_too(recipe, tmp_path):
    done = forked.run(to_all_at, 3, recipe, "--dataloader_num_workers", "1", cwd=tmp_path)
    assert done.returncode == 130, done.stderr[-3000:]
    assert "checkpoint-3 is saved" in message_of(done.stderr)
    assert checkpoints(tmp_path / "run")[-1] == "checkpoint-3"


def to_all_at(step, path, *options):
    """A run all of whose processes get Ctrl-C during a step, as from a terminal."""
    os.setpgrp()
    from liger_trainer.trainers.trainer import LigerTrainer

    training_step = LigerTrainer.training_step

    def with_signals(self, *args, **kwargs):
        if self.state.global_step + 1 == step:
            os.killpg(os.getpgrp(), signal.SIGINT)
            time.sleep(0.05)
        return training_step(self, *args, **kwargs)

    LigerTrainer.training_step = with_signals
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return run_recipe_file(path, options)


def test_no_evaluation_comes_between_a_signal_and_its_checkpoint(recipe, tmp_path):
    options = ["--eval_strategy", "steps", "--eval_steps", "3", "--save_strategy", "epoch"]
    done = forked.run(sent_at, 3, [signal.SIGTERM], recipe, *options, cwd=tmp_path)
    assert done.returncode == 143, done.stderr[-3000:]
    assert not logged("run/checkpoint-3", "eval_loss")


def test_a_second_signal_ends_it_at_once(recipe, tmp_path):
    done = forked.run(sent_at, 3, [signal.SIGTERM] * 2, recipe, cwd=tmp_path)
    assert done.returncode == -signal.SIGTERM
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]


def test_a_signal_that_two_processes_pass_on_is_one(recipe, tmp_path):
    done = forked.run(sent_at, 3, SIGNALS[:2], recipe, cwd=tmp_path)
    assert done.returncode == 143, done.stderr[-3000:]
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-3"]


def test_nohup(recipe, tmp_path):
    done = forked.run(nohup, recipe, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


def test_handlers_are_put_back(recipe):
    before = [signal.getsignal(number) for number in SIGNALS]
    assert main(["train", recipe, "--max_steps", "1"]) == 0
    assert [signal.getsignal(number) for number in SIGNALS] == before


def one_rank_gets_it(path, *options):
    return sent_at(3, [signal.SIGTERM], path, *options, rank="1")


def test_a_signal_that_one_rank_gets_ends_all_of_them(tmp_path):
    folder, recipe = tmp_path / "run", write_recipe(tmp_path / "mine.yaml", EIGHT_STEPS)
    options = ["--output_dir", str(folder)]
    done = forked.torchrun(one_rank_gets_it, recipe, *options)
    assert done.returncode == 1
    assert "exitcode  : 143" in done.stderr
    assert done.stderr.count("liger-trainer: stopped by SIGTERM at step 3; checkpoint-3 is saved") == 1
    assert checkpoints(folder) == ["checkpoint-2", "checkpoint-3"]
    done = forked.torchrun(run_recipe_file, recipe, [*options, "--resume_from_checkpoint", "true"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(logged(folder)) == list(range(1, 9))


@pytest.mark.parametrize("steps", ["1", "8"])
def test_an_update_that_overflows(steps, recipe, capsys):
    assert main(["train", recipe, "--learning_rate", "1e38", "--max_steps", steps]) == 1
    last = message_of(capsys.readouterr().err)
    assert last.startswith("liger-trainer: Stopped at step ")
    assert "parameter 'model." in last
    assert not Path("run").exists()  # nothing was saved


@pytest.mark.parametrize("rate", ["inf", "nan", "-1e-3"])
def test_a_learning_rate_out_of_range(rate, recipe, capsys):
    assert main(["train", recipe, f"--learning_rate={rate}"]) == 2
    assert "`learning_rate` is" in capsys.readouterr().err
    assert not Path("run").exists()


def test_a_loss_that_is_nan(recipe, capsys, monkeypatch):
    from liger_trainer.trainers.trainer import LigerTrainer

    compute_loss = LigerTrainer.compute_loss

    def nan_at_5(self, *args, **kwargs):
        loss = compute_loss(self, *args, **kwargs)
        return loss * math.nan if self.state.global_step == 4 else loss

    monkeypatch.setattr(LigerTrainer, "compute_loss", nan_at_5)
    assert main(["train", recipe, "--lr_scheduler_type", "constant"]) == 1
    last = message_of(capsys.readouterr().err)
    assert (
        last == "liger-trainer: stopped at step 5, by `non_finite: stop`; 'run/checkpoint-5' holds the last good state."
    )
    assert checkpoints(Path("run")) == ["checkpoint-2", "checkpoint-4", "checkpoint-5"]
    weights = [load_file(f"run/checkpoint-{step}/model.safetensors") for step in (4, 5)]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])
    assert [math.isnan(entry["loss"]) for entry in state("run/checkpoint-5")["log_history"]] == [False] * 4 + [True]
    assert not Path("run/model.safetensors").exists()


@pytest.mark.parametrize("option", [[], ["--resume_from_checkpoint", "true"], ["--overwrite_output_dir", "true"]])
def test_a_folder_in_which_another_run_is_writing(option, recipe, tmp_path):
    assert main(["train", recipe, "--max_steps", "2"]) == 0
    with owned(tmp_path / "run"):
        before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
        done = forked.run(run_recipe_file, recipe, [*option], cwd=tmp_path)
        assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before
    assert done.returncode == 2
    assert message_of(done.stderr).startswith(f"liger-trainer: `output_dir`: another run (pid {os.getpid()} on ")


def test_the_lock_of_a_killed_run_does_not_count_as_content(recipe):
    Path("run").mkdir()
    Path("run", LOCK).write_text("pid 1 on another, since 2001-01-01 00:00:00\n")
    assert main(["train", recipe, "--max_steps", "1"]) == 0
    assert not Path("run", LOCK).exists()


def test_a_damaged_checkpoint(recipe, capsys):
    assert main(["train", recipe, "--max_steps", "4"]) == 0
    optimizer = Path("run/checkpoint-4/optimizer.pt")
    optimizer.write_bytes(optimizer.read_bytes()[:-100])
    capsys.readouterr()
    assert main(["train", recipe, "--resume_from_checkpoint", "true"]) == 2
    last = message_of(capsys.readouterr().err)
    assert last == (
        "liger-trainer: The checkpoint is damaged: 'run/checkpoint-4/optimizer.pt' is cut short. Resume from "
        "'run/checkpoint-2', the one before it."
    )
    shutil.rmtree("run/checkpoint-4")
    assert main(["train", recipe, "--resume_from_checkpoint", "run/checkpoint-2"]) == 0


def test_another_kind_of_checkpoint(recipe, capsys):
    assert main(["train", recipe, "--max_steps", "2"]) == 0
    options = ["--resume_from_checkpoint", "true", "--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj"]
    assert main(["train", recipe, *options]) == 2
    last = message_of(capsys.readouterr().err)
    assert last == (
        "liger-trainer: 'run/initial_model', the model that the run started with, is missing. Resume a run that "
        "started without adapters without them (`use_peft: false`); start any other again."
    )


@pytest.mark.parametrize("limit", ["1", "3"])
def test_a_full_disk_says_which_checkpoint_may_go(limit, recipe, capsys, monkeypatch):
    from transformers import Trainer

    save_rng_state = Trainer._save_rng_state

    def full_at_6(self, output_dir):
        if self.state.global_step == 6:
            raise OSError(28, "No space left on device")
        save_rng_state(self, output_dir)

    monkeypatch.setattr(Trainer, "_save_rng_state", full_at_6)
    assert main(["train", recipe, "--save_total_limit", limit]) == 2
    last = message_of(capsys.readouterr().err)
    assert "checkpoint-6 could not be written" in last
    assert "MiB were free there" in last
    assert "save_total_limit" not in last
    if limit == "1":
        assert "beside the only checkpoint, 'run/checkpoint-4' (0." in last
    else:
        assert "delete an old checkpoint, of which 'run/checkpoint-2' (0." in last


def test_what_a_resumed_run_changes_is_said(recipe, caplog, capsys):
    assert main(["train", recipe, "--max_steps", "2"]) == 0
    assert "goes on with other values" not in caplog.text
    assert main(["train", recipe, "--resume_from_checkpoint", "true", "--learning_rate", "1e-4"]) == 0
    assert "The run in run goes on with other values: `learning_rate` 0.003 → 0.0001, `max_steps` 2 → 8." in caplog.text
    assert main(["train", recipe, "--resume_from_checkpoint", "true", "--trainer", "sft"]) == 2
    assert "`trainer` is 'sft', but run/checkpoint-8 is of `trainer: causal_lm`; start" in capsys.readouterr().err
