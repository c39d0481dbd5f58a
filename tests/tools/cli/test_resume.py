"""A run that is killed continues from its last checkpoint and ends as if nothing had happened."""

import signal
import subprocess
import sys
import time

from liger_trainer.tools.cli import run_recipe_file
from tests import forked
from tests.tools.cli.runs import (
    EIGHT_STEPS,
    MODEL,
    checkpoints,
    environment,
    logged,
    state,
    waits_passively,
    weights,
    write_recipe,
)

STEPS = 60
LONGER = {
    **EIGHT_STEPS,
    "model_config": {**EIGHT_STEPS["model_config"], "num_hidden_layers": 2},
    "test_split_size": 0.95,
    "max_length": 64,
    "max_steps": STEPS,
    "per_device_train_batch_size": 4,
    "warmup_steps": 5,
    "save_steps": 5,
}


def run(tmp_path, folder, *options):
    done = forked.run(run_recipe_file, "mine.yaml", ["--output_dir", folder, *options], cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_killed_in_the_middle_and_resumed(tmp_path):
    write_recipe(tmp_path / "mine.yaml", LONGER)
    run(tmp_path, "whole")
    expected = logged(tmp_path / "whole")
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] - 0.5

    first = tmp_path / "killed" / "checkpoint-10" / "trainer_state.json"
    command = [sys.executable, "-m", "liger_trainer", "mine.yaml", "--output_dir", "killed"]
    variables = environment(OMP_DISPLAY_ENV="VERBOSE")
    with (tmp_path / "stderr").open("w") as shown:
        process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL, stderr=shown)
    deadline = time.monotonic() + 120
    while not first.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert waits_passively((tmp_path / "stderr").read_text())
    assert not (tmp_path / "killed" / f"checkpoint-{STEPS}").exists()

    # As if it had been killed while it wrote its next checkpoint: that one must not be taken.
    cut = tmp_path / "killed" / f"checkpoint-{STEPS - 1}"
    cut.mkdir()
    (cut / "model.safetensors").write_bytes(b"\x00" * 100)

    done = run(tmp_path, "killed", "--resume_from_checkpoint", "true")
    assert "Resuming from" in done.stderr
    assert logged(tmp_path / "killed") == expected
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


GRPO = {
    "trainer": "grpo",
    "model_config": {**MODEL, "num_hidden_layers": 2},
    "tokenizer_vocab_size": 261,
    "dataset_name": "sorting_prompts",
    "reward_funcs": ["deadly_rewards:distinct"],
    "num_generations": 4,
    "max_completion_length": 6,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 12,
    "learning_rate": 1e-3,
    "save_steps": 4,
    "logging_steps": 1,
    "use_cpu": True,
    "report_to": "none",
    "loss_curve": False,
}
# Called between the generation of a step and its update.
REWARDS = """
import os, signal

def distinct(completions, trainer_state, **columns):
    if os.environ.get("DIE_AT_STEP") == str(trainer_state.global_step):
        os.kill(os.getpid(), signal.SIGKILL)
    return [float(len(set(text))) for text in completions]
"""


def test_killed_between_generation_and_update_and_resumed(tmp_path):
    write_recipe(tmp_path / "mine.yaml", GRPO)
    (tmp_path / "deadly_rewards.py").write_text(REWARDS)
    run(tmp_path, "whole")
    expected = logged(tmp_path / "whole", "reward")
    assert sorted(expected) == list(range(1, 13))
    assert len(set(expected.values())) > 3

    killed = forked.run(
        run_recipe_file, "mine.yaml", ["--output_dir", "killed"], cwd=tmp_path, environment={"DIE_AT_STEP": "6"}
    )
    assert killed.returncode == -signal.SIGKILL
    assert checkpoints(tmp_path / "killed") == ["checkpoint-4"]

    done = run(tmp_path, "killed", "--resume_from_checkpoint", "true")
    assert "Resuming from" in done.stderr
    assert logged(tmp_path / "killed", "reward") == expected
    assert state(tmp_path / "killed")["global_step"] == 12
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
