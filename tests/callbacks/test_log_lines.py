"""A recipe's logs are one line each, however narrow the terminal."""

import json

import pytest

from liger_trainer.callbacks.log_lines import log_line
from liger_trainer.tools.cli import main

DPO = {
    "loss": 0.693147,
    "grad_norm": 1.25,
    "learning_rate": 5e-07,
    "rewards/accuracies": 0.5,
    "rewards/margins": 0.0125,
    "logps/chosen": -47.6,
    "tokens_per_second": 123456.7,
    "epoch": 0.1,
}


@pytest.mark.parametrize("width", [20, 80, 100, 200])
def test_it_fits_and_begins_with_what_matters(width):
    line = log_line(DPO, 10, width)
    assert line.startswith("step 10")
    assert len(line) < width
    assert "logps" not in line
    assert ("loss 0.6931" in line) == (width > 20)
    assert ("rewards/accuracies 0.5" in line) == (width > 20)
    assert ("tokens_per_second 123,457" in line) == (width > 100)


def test_evaluations_and_the_end():
    assert log_line({"eval_loss": 1.5, "eval_runtime": 3.25, "epoch": 1.0}, 3, 80) == (
        "step 3  eval_loss 1.5  epoch 1  eval_runtime 3.25"
    )
    assert log_line({"train_loss": float("nan")}, 3, 80) == "step 3  train_loss nan"
    assert log_line({"loss": None, "note": "text"}, 3, 80) == "step 3"


def test_a_run_shows_lines_and_keeps_every_number(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "llama3_8b_dpo", "--smoke", "--output_dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    lines = [line.strip() for line in shown.splitlines() if line.strip().startswith("step ")]
    assert len(lines) == 3 + 1 + 1  # steps, evaluation and end
    assert all(len(line) < 80 for line in lines)
    assert "{'loss'" not in shown
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert "logps/chosen" in history[0]
