"""The ways to start a recipe, as a user types them, each in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from liger_trainer.cli import run_recipe_file
from tests.forked import torchrun

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


@pytest.fixture
def start(tmp_path):
    def run(*command, timeout=120):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        done = subprocess.run(
            [*map(str, command)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done

    return run


def steps(folder):
    return json.loads((folder / "trainer_state.json").read_text())["global_step"]


def test_accelerate_launch_runs_a_recipe_literally(start, tmp_path):
    folder = tmp_path / "run"
    done = start(*LAUNCH, ROOT / "recipes" / "llama3_8b_sft.yaml", "--smoke", "--output_dir", folder)
    assert "training loss" in done.stdout
    assert steps(folder) == 3


def test_accelerate_launch_runs_a_block_style_recipe_as_a_module(start, tmp_path):
    (tmp_path / "mine.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\nlora_target_modules:\n  - q_proj\n")
    start(*LAUNCH, "-m", "liger_trainer", "mine.yaml", "--smoke", "--output_dir", "run")
    assert steps(tmp_path / "run") == 3


# A warm start and generation, as a user launches it. Adapters; a vision tower left unused; a new model and a reference
# from one folder: other recipes are no other launch.
@pytest.mark.parametrize("recipe", ["quickstart_grpo", "qwen3_30b_a3b_sft", "gemma3_4b_sft", "llama3_8b_dpo"])
def test_two_processes(start, recipe):
    """Each rank finds the same temporary folder, data and tokenizer; gloo on the CPU."""
    file, options = ROOT / "recipes" / f"{recipe}.yaml", ["--smoke", "--use_cpu", "true"]
    if recipe == "quickstart_grpo":
        launcher = [*LAUNCH, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
        done = start(*launcher, file, *options, timeout=240)
    else:
        done = torchrun(run_recipe_file, str(file), options)
        assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("training loss") == 1
    folder = Path(next(line.split(None, 2)[2] for line in done.stdout.splitlines() if "saved model" in line))
    assert steps(folder) == 3


def test_two_processes_share_the_experts(tmp_path):
    """What they save is whole, and transformers alone reads it."""
    folder = tmp_path / "run"
    options = ["--smoke", "--use_cpu", "true", "--expert_parallel_size", "2", "--output_dir", str(folder)]
    done = torchrun(run_recipe_file, str(ROOT / "recipes" / "qwen3_30b_a3b_sft_ep.yaml"), options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "expert exchange" in done.stdout
    assert steps(folder) == 3
    for saved in (folder, folder / "checkpoint-3"):
        model, found = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(found.values()), found
        assert len(model.model.layers[0].mlp.experts.down_proj) == model.config.num_experts == 4


def test_help(start):
    done = start(sys.executable, "-m", "liger_trainer", "--help")
    for word in ("train", "doctor", "inspect", "recipes", "examples:"):
        assert word in done.stdout
