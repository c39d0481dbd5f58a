"""The benchmark of the optimizer's step runs without a GPU, and counts bytes."""

import dataclasses

from liger_trainer.benchmarks import optimizer_step
from liger_trainer.benchmarks.models import MODELS
from liger_trainer.benchmarks.optimizer_step import PROVIDERS
from liger_trainer.benchmarks.records import Run


def test_every_optimizer(tmp_path, monkeypatch, capsys):
    sizes = {"hidden": 256, "intermediate": 256, "vocab": 512, "head_dim": 64, "kv_heads": 4}
    monkeypatch.setitem(MODELS, "tiny", dataclasses.replace(MODELS["tiny"], **sizes))
    options = ["--model", "tiny", "--layers", "1", "--rounds", "1", "--device", "cpu", "--output", str(tmp_path)]
    optimizer_step.main(options)
    records = {record.provider: record for record in Run.read(tmp_path / "results.json").records}
    assert list(records) == list(PROVIDERS)
    bytes_each = {"torch": 8, "torch dtype=float32": 16, "liger_trainer states=bf16": 10}
    for name, each in bytes_each.items():
        assert records[name].remark == f"{each:.2f} bytes a weight"
    assert 8.03 <= float(records["liger_trainer"].remark.split()[0]) < 8.1  # norms have states in fp32
    floors = [records[name].floor for name in ("torch", "torch dtype=float32", "liger_trainer states=bf16")]
    assert [round(floor / floors[0] * 14) for floor in floors] == [14, 28, 18]
    assert all(record.both > 0 for record in records.values() if not record.failure)
    assert "liger_trainer states=fp32" in capsys.readouterr().out
