"""A recipe's logs are one line each, however narrow the terminal."""

import json
import re

import pytest

from liger_trainer.callbacks.log_lines import columns_of, log_line
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
    line = log_line(DPO, 10, columns_of(DPO, width))
    assert line.startswith("step 10")
    assert len(line) < width
    assert "logps" not in line
    assert ("loss 0.6931" in line) == (width > 20)
    assert ("accuracy 0.5" in line) == (width > 20)
    assert ("tokens/s 123,457" in line) == (width > 80)


def test_lines_of_a_run_have_the_same_columns():
    columns = columns_of(DPO, 200)
    first, second = log_line(DPO, 10, columns), log_line({"loss": 12345.0, "learning_rate": 1e-7}, 20, columns)
    assert [first.index(each) for each in columns.values()] == [second.index(each) for each in columns.values()]
    assert "loss 12,345" in second
    assert "grad_norm -" in second


def test_evaluations_and_the_end():
    logs = {"eval_loss": 1.5, "eval_runtime": 3.25, "epoch": 1.0}
    assert log_line(logs, 3, columns_of(logs, 120)).split() == [
        *("step", "3", "eval_loss", "1.5", "epoch", "1", "eval_runtime", "3.25"),
    ]
    assert columns_of({"loss": None, "note": "text"}, 80) == {}
    assert log_line({"train_loss": float("nan")}, 3, {"train_loss": "train_loss"}).endswith("train_loss nan")


def test_a_run_shows_lines_and_keeps_every_number(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert main(["train", "llama3_8b_dpo", "--smoke", "--output_dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    lines = [line.strip() for line in shown.splitlines() if line.strip().startswith("step ")]
    assert len(lines) == 3 + 1 + 1  # steps, evaluation and end
    assert all(len(line) <= 80 for line in lines)
    assert re.search(r"step 1 .* \d:\d\d:\d\d left", lines[0])
    assert "left" not in lines[-1]
    assert "{'loss'" not in shown
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert "logps/chosen" in history[0]


def test_whole_lines_where_the_output_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "llama3_8b_grpo", "--smoke", "--output_dir", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("step ")]
    for name in ("reward", "reward_std", "tokens/s", "GiB", "lr", "length", "clipped"):
        assert f" {name}" in lines[0]
