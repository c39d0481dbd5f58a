"""Recipes of a tiny model on a few rows."""

import json
from pathlib import Path

import datasets  # noqa: F401 (first imported inside a test, it would log to the captured stderr of that test)
import pytest

from tests.tools.cli.runs import TINY, write_recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Writes a small valid recipe with changes (None removes a key) and gives its path."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text("".join(json.dumps({"text": f"row {i} " * 9}) + "\n" for i in range(40)))
    values = {
        "trainer": "causal_lm",
        "model_config": TINY,
        "tokenizer_vocab_size": 300,
        "data_files": "data.jsonl",
        "max_length": 16,
        "max_steps": 2,
        "use_cpu": True,
        "output_dir": "run",
        "report_to": "none",
        "save_strategy": "no",
        "loss_curve": False,
    }
    return lambda **changes: write_recipe(tmp_path / "mine.yaml", {**values, **changes})
