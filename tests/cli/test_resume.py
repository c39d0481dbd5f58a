"""A run that is killed continues from its last checkpoint and ends as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from liger_trainer.cli import run_recipe_file
from tests import forked

ROOT = Path(__file__).parents[2]
STEPS = 60
RECIPE = """
trainer: causal_lm
model_config:
  model_type: llama
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 1
  attention_dropout: 0.1  # so that the random state matters
tokenizer_vocab_size: 300
dataset_name: pydoc_topics
test_split_size: 0.95
max_length: 64
max_steps: 60
per_device_train_batch_size: 4
learning_rate: 3e-3
lr_scheduler_type: cosine
warmup_steps: 5
save_steps: 5
logging_steps: 1
use_cpu: true
report_to: none
loss_curve: false
"""


def environment():
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


def run(tmp_path, folder, *options):
    done = forked.run(run_recipe_file, "mine.yaml", ["--output_dir", folder, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def losses(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["loss"] for entry in history if "loss" in entry}


def test_killed_in_the_middle_and_resumed(tmp_path):
    (tmp_path / "mine.yaml").write_text(RECIPE)
    run(tmp_path, "whole")
    expected = losses(tmp_path / "whole")
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] - 0.5

    first = tmp_path / "killed" / "checkpoint-10" / "trainer_state.json"
    command = [sys.executable, "-m", "liger_trainer", "mine.yaml", "--output_dir", "killed"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / f"checkpoint-{STEPS}").exists()

    # As if it had been killed while it wrote its next checkpoint: that one must not be taken.
    cut = tmp_path / "killed" / f"checkpoint-{STEPS - 1}"
    cut.mkdir()
    (cut / "model.safetensors").write_bytes(b"\x00" * 100)

    done = run(tmp_path, "killed", "--resume_from_checkpoint", "true")
    assert "Resuming from" in done.stderr
    assert losses(tmp_path / "killed") == expected
    resumed = (tmp_path / "killed" / "model.safetensors").read_bytes()
    assert resumed == (tmp_path / "whole" / "model.safetensors").read_bytes()


GRPO_STEPS = 12
GRPO = """
trainer: grpo
model_config:
  model_type: llama
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 2
  num_key_value_heads: 1
tokenizer_vocab_size: 261
dataset_name: sorting_prompts
reward_funcs: ["deadly_rewards:distinct"]
num_generations: 4
max_completion_length: 6
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
max_steps: 12
learning_rate: 1e-3
save_steps: 4
logging_steps: 1
use_cpu: true
report_to: none
loss_curve: false
"""
# Called between the generation of a step and its update.
REWARDS = """
import os, signal

def distinct(completions, trainer_state, **columns):
    if os.environ.get("DIE_AT_STEP") == str(trainer_state.global_step):
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(set(text))) for text in completions]
"""


def test_killed_between_generation_and_update_and_resumed(tmp_path):
    (tmp_path / "mine.yaml").write_text(GRPO)
    (tmp_path / "deadly_rewards.py").write_text(REWARDS)
    run(tmp_path, "whole")
    expected = rewards(tmp_path / "whole")
    assert sorted(expected) == list(range(1, GRPO_STEPS + 1))
    assert len(set(expected.values())) > 3

    killed = forked.run(
        run_recipe_file, "mine.yaml", ["--output_dir", "killed"], cwd=tmp_path, environment={"DIE_AT_STEP": "6"}
    )
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "killed").glob("checkpoint-*")] == ["checkpoint-4"]

    done = run(tmp_path, "killed", "--resume_from_checkpoint", "true")
    assert "Resuming from" in done.stderr
    assert rewards(tmp_path / "killed") == expected
    state = json.loads((tmp_path / "killed" / "trainer_state.json").read_text())
    assert state["global_step"] == GRPO_STEPS
    resumed = (tmp_path / "killed" / "model.safetensors").read_bytes()
    assert resumed == (tmp_path / "whole" / "model.safetensors").read_bytes()


def rewards(folder):
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["reward"] for entry in history if "reward" in entry}
