"""Text of JSON files that looks like something else."""

from __future__ import annotations

import gzip
import json

import pytest
from datasets import load_dataset

from liger_trainer.data.files import load_files
from liger_trainer.data.turns import without_none

ROWS = {
    "times": {
        "completion": "2024-01-01",
        "at": "2024-01-01T10:00:00Z",
        "tools": [{"name": "f", "default": "2024-01-01", "deep": {"list": [["2024-01-01"]]}}],
    },
    "numbers": {"completion": "007", "more": ["1e5", "true", "null", ""]},
}
MIXED = [{"content": value} for value in ("42", "null", "2024-01-01", ["[1]", 3], {"a": "5"}, None)]


@pytest.mark.parametrize("rows", [[ROWS["times"]] * 2, [ROWS["numbers"]] * 2, MIXED], ids=["times", "numbers", "mixed"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "indented.json"])
def test_text_of_json_stays_text(rows, name, tmp_path):
    lines = "\n".join(map(json.dumps, rows))
    text = {"a.jsonl": lines, "a.json": json.dumps(rows), "indented.json": json.dumps(rows, indent=1)}[name]
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert load_files([str(tmp_path / name)], "data_files", bool).to_list() == rows


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_rows_under_a_key(name, tmp_path):
    rows = [{"text": "007", "created_at": "2024-01-01", "date": "2024-01-01", "n": 5}] * 2
    text = json.dumps({"version": "1", "data": rows}).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert [without_none(row) for row in load_files([str(tmp_path / name)], "data_files", bool).to_list()] == rows


def test_a_row_over_several_lines_and_a_list_after_a_blank_line(tmp_path):
    row = {"completion": "2024-01-01", "at": "2024-01-01", "turns": [{"role": "user", "content": "2024-01-01"}]}
    for text in (json.dumps(row, indent=1), "\n" + json.dumps([row]), json.dumps(row)):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        assert load_files([str(tmp_path / "a.json")], "data_files", bool).to_list() == [row]


def test_what_others_read_is_as_before(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "2024-01-01"}), encoding="utf-8")
    load_files([str(tmp_path / "a.jsonl")], "data_files", bool)
    rows = load_dataset("json", data_files=[str(tmp_path / "a.jsonl")], split="train", cache_dir=str(tmp_path / "c"))
    assert rows.features["text"].dtype == "timestamp[s]"
