"""A rank that dies ends the job, which names it, and the run continues from its last checkpoint."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from liger_trainer.cli import run_recipe_file
from liger_trainer.cli.ranks import lost_a_peer
from liger_trainer.recipe.file import RecipeError, TrainingError
from tests.forked import torchrun

ROOT = Path(__file__).parents[2]
STEPS = 8
RECIPE = """
trainer: causal_lm
model_config:
  model_type: llama
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 1
  num_attention_heads: 2
  num_key_value_heads: 1
  attention_dropout: 0.1  # so that the random state of each rank matters
tokenizer_vocab_size: 300
dataset_name: pydoc_topics
test_split_size: 0.98
eval_strategy: "no"
max_length: 32
max_steps: 8
per_device_train_batch_size: 2
learning_rate: 3e-3
lr_scheduler_type: cosine
save_steps: 2
logging_steps: 1
use_cpu: true
report_to: none
loss_curve: false
kernel_report: false
"""
LIMIT = 120  # seconds; torch's own for a collective is 1800


def run_forked(folder, *options):
    """The same run, undisturbed."""
    Path(f"{folder}.yaml").write_text(RECIPE)
    return torchrun(run_recipe_file, f"{folder}.yaml", ["--output_dir", str(folder), *options])


def run(folder, *options, fault, step):
    """A run as a user launches it, one rank of which meets `fault` at `step`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--main_process_port", "0", "-m", "tests.cli.faulty_rank", f"{folder}.yaml"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    environment |= {"FAULT": fault, "FAULT_STEP": str(step)}
    Path(f"{folder}.yaml").write_text(RECIPE)
    began = time.monotonic()
    done = subprocess.run(
        [*command, "--output_dir", str(folder), *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=2 * LIMIT,
    )
    assert time.monotonic() - began < LIMIT
    return done


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def saved(folder):
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_a_rank_that_dies_is_named_and_the_run_goes_on(tmp_path):
    whole, faulty = tmp_path / "whole", tmp_path / "faulty"
    done = run_forked(whole)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(losses(whole)) == list(range(1, STEPS + 1))

    killed = run(faulty, fault="kill", step=3)
    assert killed.returncode == 1
    cause = killed.stderr.split("Root Cause")[1]
    assert "rank      : 1" in cause
    assert "SIGKILL" in cause
    assert "gloo" not in killed.stderr  # what the other rank saw is no cause
    assert saved(faulty) == ["checkpoint-2"]

    raised = run(faulty, "--resume_from_checkpoint", "true", fault="raise", step=5)
    assert raised.returncode == 1
    first = raised.stderr.index("Traceback")
    assert "ArithmeticError: the fault of rank 1" in raised.stderr[first:].split("Traceback")[1]
    cause = raised.stderr.split("Root Cause")[1]
    assert "rank      : 1" in cause
    assert "ArithmeticError: the fault of rank 1" in cause
    assert "gloo" not in raised.stderr
    assert saved(faulty) == ["checkpoint-2", "checkpoint-4"]

    done = run_forked(faulty, "--resume_from_checkpoint", "true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(faulty) == losses(whole)
    assert (faulty / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a reward function's server, say
    ],
)
def test_the_error_of_a_broken_collective_is_told_from_others(error, lost):
    assert lost_a_peer(error) is lost


@pytest.mark.parametrize(("error", "told"), [(TrainingError("a bad row"), True), (RecipeError("a bad key"), False)])
def test_what_one_rank_alone_may_know_is_told_by_any(error, told, monkeypatch, capsys):
    def failing(recipe):
        raise error

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("liger_trainer.recipe.load_recipe", lambda *args, **kwargs: None)
    monkeypatch.setattr("liger_trainer.recipe.run.run_recipe", failing)
    assert run_recipe_file("some.yaml", []) == 2
    assert ("liger-trainer: rank 1: a bad row" in capsys.readouterr().err) == told
