"""What a run shows: each thing once, no noise of libraries, and no more columns than the terminal has."""

import os
import runpy
import subprocess
import sys
import warnings

import pytest
import torch

from liger_trainer.configs.flags import LigerTrainingArguments
from liger_trainer.configs.trl_configs import LigerDPOConfig
from liger_trainer.tools.cli import main, run_recipe_file
from liger_trainer.tools.cli.run_recipe import prepare_environment
from tests.distributed.accelerate_launch import as_launched
from tests.tools.cli.runs import MODEL, OPENMP, environment, message_of, state, waits_passively, write_recipe

SILENCE = "TRL_EXPERIMENTAL_SILENCE"


def in_a_process(folder, *arguments, **variables):
    unset = ("OMP_NUM_THREADS", "PYTHONWARNINGS", "DS_ACCELERATOR", "RANK", SILENCE)
    inherited = {key: value for key, value in environment().items() if key not in unset}
    return subprocess.run(
        [sys.executable, "-m", "liger_trainer", *map(str, arguments)],
        cwd=folder,
        env={**inherited, "COLUMNS": "80", **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.parametrize("arguments", [["none.yaml"], ["train", "none.yaml"]])
def test_a_mistake_is_the_exit_code_of_the_process(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["liger_trainer", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module("liger_trainer", run_name="__main__")
    assert stopped.value.code == 2
    assert "No recipe file 'none.yaml'" in message_of(capsys.readouterr().err)


@pytest.mark.parametrize("name", [None, *OPENMP])
def test_the_users_settings_of_waiting_threads_win(name, monkeypatch):
    monkeypatch.setattr(os, "environ", {} if name is None else {name: "77"})
    prepare_environment()
    assert {key: value for key, value in os.environ.items() if key in OPENMP} == {
        name or "OMP_WAIT_POLICY": "77" if name else "PASSIVE"
    }


@pytest.fixture
def recipe(tmp_path):
    values = {"trainer": "causal_lm", "model_config": MODEL, "tokenizer_vocab_size": 300, "max_length": 32}
    values |= {"dataset_name": "pydoc_topics", "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1}
    values |= {"output_dir": str(tmp_path / "run"), "save_strategy": "no", "report_to": "none"}
    return write_recipe(tmp_path / "mine.yaml", {**values, "sample_prompts": ["The class"], "sample_tokens": 4})


def test_each_thing_is_shown_once(recipe, tmp_path):
    done = in_a_process(tmp_path, "train", recipe, OMP_DISPLAY_ENV="VERBOSE")
    assert done.returncode == 0, done.stderr
    assert waits_passively(done.stderr)
    assert done.stdout.count("liger_trainer kernels in") == 1
    assert done.stdout.count("\nResult\n") == done.stdout.count("\nThe class") == 1
    for noise in ("Setting accelerator to CPU", "Warning"):
        assert noise not in done.stderr
    lines = [line for line in done.stdout.splitlines() if str(tmp_path) not in line]
    assert max(len(line) for line in lines if not line.startswith("step ")) <= 80  # those of steps are whole in a file


@pytest.mark.parametrize("command", ["train", "doctor", "plan"])
def test_a_mistake_is_the_only_line(command, recipe, tmp_path):
    """bitsandbytes and TRL's experimental trainers are imported by us, and what they say then is no user's concern."""
    done = in_a_process(
        tmp_path, command, recipe, *(["--gpus", "1"] if command == "plan" else []), "--attn_implementaton", "sdpa"
    )
    assert done.returncode == 2
    assert message_of(done.stderr) == done.stderr.rstrip()


@pytest.mark.parametrize("ours", ["LigerORPOConfig", "LigerCPOTrainer", "LigerGKDTrainer"])
def test_our_import_of_an_experimental_trainer_warns_of_nothing(ours, tmp_path):
    silent = {name: value for name, value in environment().items() if name not in ("PYTHONWARNINGS", SILENCE)}
    command = [sys.executable, "-c", f"from liger_trainer import {ours}"]
    done = subprocess.run(command, cwd=tmp_path, env=silent, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "trl.experimental" not in done.stderr


@pytest.mark.parametrize("columns", [80, 100, 160])
def test_a_plan_is_as_wide_as_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", "llama3_8b_sft", "--gpus", "2", "--gpu_memory", "80GB", "--smoke"]) == 0
    out = capsys.readouterr().out
    table, command = out.split("  liger-trainer train")
    assert max(map(len, table.splitlines())) <= columns
    assert command.count("\n") == 1, "one line, to be copied"
    assert ("best: weights" in table) == (columns < 160)
    assert ("│ weights" in table or "┃ weights" in table) == (columns == 160)
    assert "FSDP2, checkpointing, offloading" in table


def test_the_default_of_trl_is_no_deprecated_name(tmp_path):
    """transformers warns of `gradient_checkpointing`, which nobody has written here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        args = LigerDPOConfig(str(tmp_path), bf16=False)
        assert args.gradient_checkpointing
        assert not LigerTrainingArguments(str(tmp_path)).gradient_checkpointing
    assert not LigerDPOConfig(str(tmp_path), bf16=False, gradient_checkpointing=False).gradient_checkpointing


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without an accelerator")
def test_two_processes_without_a_gpu_train_together(recipe, tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command) or 0)
    assert main(["train", recipe, "--accelerate_config", "ddp", "--num_processes", "2"]) == 0
    (command,) = commands
    assert command[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    assert command[-3:] == ["-m", "liger_trainer", recipe]
    done = as_launched(command[3:], run_recipe_file, recipe, [])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nResult\n") == 1
    assert done.stdout.count("liger_trainer kernels in") == 1
    options = ["--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "alone")]
    assert main(["train", str(recipe), *options]) == 0
    alone, together = (state(tmp_path / folder)["log_history"][:2] for folder in ("alone", "run"))
    for one, two in zip(alone, together, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without an accelerator")
@pytest.mark.parametrize("config", ["fsdp2", "zero2"])
def test_a_model_is_not_split_without_gpus(recipe, tmp_path, config, capsys):
    assert main(["train", str(recipe), "--accelerate_config", config, "--num_processes", "2"]) == 2
    shown = capsys.readouterr().err
    assert f"`--accelerate_config {config}` splits the model over GPUs" in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "run").exists()
