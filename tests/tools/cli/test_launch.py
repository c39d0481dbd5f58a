"""The ways to start a recipe, as a user types them."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from liger_trainer.tools.cli import main, run_recipe_file
from tests.forked import torchrun
from tests.tools.cli.runs import ROOT, environment, state


def test_accelerate_launch_runs_a_recipe_literally(tmp_path):
    """`test_terminal.py` launches one as a module."""
    recipe, folder = ROOT / "recipes" / "llama3_8b_sft.yaml", tmp_path / "run"
    command = [sys.executable, "-m", "accelerate.commands.launch", recipe, "--smoke", "--output_dir", folder]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "training loss" in done.stdout
    assert state(folder)["global_step"] == 3


# A warm start and generation; adapters; a vision tower left unused; a new model and a reference from one folder: other
# recipes are no other launch.
@pytest.mark.parametrize("recipe", ["quickstart_grpo", "qwen3_30b_a3b_sft", "gemma3_4b_sft", "llama3_8b_dpo"])
def test_two_processes(recipe):
    """Each rank finds the same temporary folder, data and tokenizer; gloo on the CPU."""
    done = torchrun(run_recipe_file, str(ROOT / "recipes" / f"{recipe}.yaml"), ["--smoke", "--use_cpu", "true"])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("saved model") == 1
    folder = Path(next(line.split(None, 2)[2] for line in done.stdout.splitlines() if "saved model" in line))
    assert state(folder)["global_step"] == 3


def test_two_processes_share_the_experts(tmp_path):
    """What they save is whole, and transformers alone reads it."""
    folder = tmp_path / "run"
    options = ["--smoke", "--use_cpu", "true", "--expert_parallel_size", "2", "--output_dir", str(folder)]
    done = torchrun(run_recipe_file, str(ROOT / "recipes" / "qwen3_30b_a3b_sft_ep.yaml"), options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "expert exchange" in done.stdout
    assert state(folder)["global_step"] == 3
    for saved in (folder, folder / "checkpoint-3"):
        model, found = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
        assert not any(found.values()), found
        assert len(model.model.layers[0].mlp.experts.down_proj) == model.config.num_experts == 4


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for word in ("train", "doctor", "inspect", "recipes", "examples:"):
        assert word in shown
