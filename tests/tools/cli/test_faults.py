"""A rank that dies ends the job, which names it, and the run continues from its last checkpoint."""

import subprocess
import sys
import time

import pytest
import torch

from liger_trainer.recipe.file import RecipeError, TrainingError
from liger_trainer.tools.cli import run_recipe_file
from liger_trainer.tools.cli.run_recipe import lost_a_peer
from tests.forked import torchrun
from tests.tools.cli.faulty_rank import run_with_fault
from tests.tools.cli.runs import EIGHT_STEPS, ROOT, checkpoints, environment, logged, weights, write_recipe

LIMIT = 120  # seconds; torch's own for a collective is 1800
RESUMED = ("--resume_from_checkpoint", "true")


def launched(folder, *options, fault, step):
    """A run as a user launches it, whose rank 1 fails at `step`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--main_process_port", "0", "-m", "tests.tools.cli.faulty_rank"]
    command += [write_recipe(f"{folder}.yaml", {**EIGHT_STEPS, "output_dir": str(folder)}), *options]
    variables = environment(FAULT=fault, FAULT_STEP=str(step))
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=2 * LIMIT)
    assert time.monotonic() - began < LIMIT
    return done


def forked(folder, *options, work=run_recipe_file, **variables):
    recipe = write_recipe(f"{folder}.yaml", {**EIGHT_STEPS, "output_dir": str(folder)})
    return torchrun(work, recipe, options, environment=variables)


def test_a_rank_that_dies_is_named_and_the_run_continues(tmp_path):
    whole, faulty = tmp_path / "whole", tmp_path / "faulty"
    done = forked(whole)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(logged(whole)) == list(range(1, 9))

    killed = forked(faulty, work=run_with_fault, FAULT="kill", FAULT_STEP="3")
    assert killed.returncode == 1
    cause = killed.stderr.split("Root Cause")[1]
    assert "rank      : 1" in cause
    assert "SIGKILL" in cause
    assert "gloo" not in cause  # what the other rank saw, which the launcher's SIGTERM may have it say
    assert checkpoints(faulty) == ["checkpoint-2"]

    raised = launched(faulty, *RESUMED, fault="raise", step=5)
    assert raised.returncode == 1
    first = raised.stderr.index("Traceback")
    assert "ArithmeticError: the fault of rank 1" in raised.stderr[first:].split("Traceback")[1]
    cause = raised.stderr.split("Root Cause")[1]
    assert "rank      : 1" in cause
    assert "ArithmeticError: the fault of rank 1" in cause
    assert "gloo" not in cause
    assert checkpoints(faulty) == ["checkpoint-2", "checkpoint-4"]

    done = forked(faulty, *RESUMED)
    assert done.returncode == 0, done.stderr[-3000:]
    assert logged(faulty) == logged(whole)
    assert weights(faulty) == weights(whole)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a reward function's server, say
    ],
)
def test_the_error_of_a_broken_collective_is_recognised(error, lost):
    assert lost_a_peer(error) is lost


@pytest.mark.parametrize(("error", "shown"), [(TrainingError("a bad row"), True), (RecipeError("a bad key"), False)])
def test_any_rank_reports_an_error_that_others_may_not_have(error, shown, monkeypatch, capsys):
    def failing(recipe):
        raise error

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("liger_trainer.recipe.load_recipe", lambda *args, **kwargs: None)
    monkeypatch.setattr("liger_trainer.recipe.run.run_recipe", failing)
    assert run_recipe_file("some.yaml", []) == 2
    assert ("liger-trainer: rank 1: a bad row" in capsys.readouterr().err) == shown
