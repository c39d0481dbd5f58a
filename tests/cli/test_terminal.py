"""What a run shows: each thing once, no noise of libraries, and no more columns than the terminal has."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from liger_trainer.cli import main
from liger_trainer.configs.dpo_config import LigerDPOConfig
from liger_trainer.configs.training_arguments import LigerTrainingArguments

ROOT = Path(__file__).parents[2]
MODEL = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
MODEL |= {"num_attention_heads": 2, "max_position_embeddings": 128}


def in_a_process(folder, *arguments, **environment):
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "DS_ACCELERATOR", "RANK")
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    return subprocess.run(
        [sys.executable, "-m", "liger_trainer", *map(str, arguments)],
        cwd=folder,
        env={**kept, "PYTHONPATH": path, "COLUMNS": "80", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp says what it was given")
@pytest.mark.parametrize(
    ("command", "given", "policy", "spins"),
    [
        (("train", "quickstart"), {}, "PASSIVE", "0"),
        ((str(ROOT / "recipes" / "quickstart.yaml"),), {}, "PASSIVE", "0"),
        (("train", "quickstart"), {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", None),
        ((str(ROOT / "recipes" / "quickstart.yaml"),), {"GOMP_SPINCOUNT": "77"}, None, "77"),
    ],
)
def test_threads_that_wait_do_not_spin(tmp_path, command, given, policy, spins):
    """Set before OpenMP is loaded, and only where the user has said nothing; the run ends at its wrong option."""
    done = in_a_process(tmp_path, *command, "--max_steps", "0", OMP_DISPLAY_ENV="VERBOSE", **given)
    assert done.returncode == 2
    assert "`max_steps` is 0" in done.stderr
    shown = dict(re.findall(r"(OMP_WAIT_POLICY|GOMP_SPINCOUNT) = '(\w+)'", done.stderr))
    assert policy in (None, shown["OMP_WAIT_POLICY"])
    assert spins in (None, shown["GOMP_SPINCOUNT"])


@pytest.fixture
def recipe(tmp_path):
    values = {"trainer": "causal_lm", "model_config": MODEL, "tokenizer_vocab_size": 300, "max_length": 32}
    values |= {"dataset_name": "pydoc_topics", "max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1}
    values |= {"output_dir": str(tmp_path / "run"), "save_strategy": "no", "report_to": "none"}
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps(values))
    return path


def test_each_thing_is_shown_once(recipe, tmp_path):
    done = in_a_process(tmp_path, "train", recipe)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("liger_trainer kernels in") == 1
    assert done.stdout.count("\nResult\n") == 1
    for noise in ("Setting accelerator to CPU", "Warning"):
        assert noise not in done.stderr
    assert max(len(line) for line in done.stdout.splitlines() if str(tmp_path) not in line) <= 80


def test_a_warm_start_reports_its_kernels_with_the_rest(tmp_path, capsys):
    assert main(["train", "quickstart_dpo", "--smoke", "--output_dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("liger_trainer kernels in") == 1


def test_a_shipped_recipe_does_not_warn_about_itself(tmp_path, caplog):
    assert main(["train", "llama3_8b_sft", "--smoke", "--max_steps", "1", "--output_dir", str(tmp_path)]) == 0
    assert "lora_target_modules" not in caplog.text


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


def processes(folder, recipe, config):
    return in_a_process(folder, "train", recipe, "--accelerate_config", config, "--num_processes", "2")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without an accelerator")
def test_two_processes_without_a_gpu_train_together(recipe, tmp_path):
    done = processes(tmp_path, recipe, "ddp")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nResult\n") == 1
    assert done.stdout.count("liger_trainer kernels in") == 1
    together = json.loads((tmp_path / "run" / "trainer_state.json").read_text())
    options = ["--per_device_train_batch_size", "4", "--output_dir", str(tmp_path / "alone")]
    assert main(["train", str(recipe), *options]) == 0
    alone = json.loads((tmp_path / "alone" / "trainer_state.json").read_text())
    for one, two in zip(alone["log_history"][:2], together["log_history"][:2], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(two["grad_norm"], rel=1e-3)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for a machine without an accelerator")
@pytest.mark.parametrize("config", ["fsdp2", "zero2"])
def test_a_model_is_not_split_without_gpus(recipe, tmp_path, config, capsys):
    assert main(["train", str(recipe), "--accelerate_config", config, "--num_processes", "2"]) == 2
    told = capsys.readouterr().err
    assert f"`--accelerate_config {config}` splits the model over GPUs" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "run").exists()
