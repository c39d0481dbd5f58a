"""Small recipes, their runs in this process or another, and what the runs leave behind."""

import json
import os
import re
import sys
from pathlib import Path

from liger_trainer.tools.cli import main

ROOT = Path(__file__).parents[3]
TINY = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
MODEL = {**TINY, "hidden_size": 32, "intermediate_size": 64}
EIGHT_STEPS = {
    "trainer": "causal_lm",
    "model_config": {**MODEL, "attention_dropout": 0.1},  # so that the random state of each process matters
    "tokenizer_vocab_size": 300,
    "dataset_name": "pydoc_topics",
    "test_split_size": 0.98,
    "eval_strategy": "no",
    "max_length": 32,
    "max_steps": 8,
    "per_device_train_batch_size": 2,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine",
    "save_steps": 2,
    "logging_steps": 1,
    "use_cpu": True,
    "report_to": "none",
    "loss_curve": False,
    "kernel_report": False,
}


def write_recipe(path, values):
    """Writes a recipe without the keys whose value is None, and gives its path as text."""
    Path(path).write_text(
        "".join(f"{key}: {json.dumps(value)}\n" for key, value in values.items() if value is not None)
    )
    return str(path)


def rows(*values):
    """Writes rows of data, and gives the file's name."""
    Path("rows.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    return "rows.jsonl"


def refused(capsys, *arguments):
    """Runs a recipe that must be refused without a traceback, and gives its message, which is one line."""
    assert main(["train", *arguments]) == 2
    return message_of(capsys.readouterr().err)


def waits_passively(stderr):
    """Whether OpenMP was loaded after its variables were set; libgomp shows them, which Linux has."""
    shown = dict(re.findall(r"(OMP_WAIT_POLICY|GOMP_SPINCOUNT) = '(\w+)'", stderr))
    return sys.platform != "linux" or shown == {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def message_of(stderr):
    assert "Traceback" not in stderr
    last = stderr.rstrip().splitlines()[-1]
    assert last.startswith("liger-trainer: ")
    return last


def environment(**variables):
    """The environment of a new process, without what a recipe that has run in this one has set."""
    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    inherited = {key: value for key, value in os.environ.items() if key not in OPENMP}
    return {**inherited, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **variables}


def state(folder):
    """The Trainer's state that a run has saved."""
    return json.loads((Path(folder) / "trainer_state.json").read_text())


def logged(folder, key="loss"):
    """Step to logged value."""
    return {entry["step"]: entry[key] for entry in state(folder)["log_history"] if key in entry}


def checkpoints(folder):
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


def weights(folder):
    return (Path(folder) / "model.safetensors").read_bytes()
