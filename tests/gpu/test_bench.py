"""The benchmark suite on an accelerator: events, memory and floors are plausible, and the pictures are drawn."""

import pytest

from liger_trainer.benchmarks.records import Run
from liger_trainer.tools.cli import main

pytestmark = pytest.mark.gpu


def test_measurements_are_plausible(tmp_path):
    arguments = ["rms_norm", "linear_cross_entropy", "--model", "qwen3-30b-a3b", "--tokens", "2048,4096"]
    arguments += ["--providers", "torch,liger_trainer", "--rounds", "5", "--output", str(tmp_path)]
    assert main(["bench", *arguments]) == 0
    run = Run.read(tmp_path / "results.json")
    assert run.machine.copy_rate > 1e11
    assert run.machine.matmul_rate > 1e13
    for record in run.records:
        assert record.failure == ""
        assert record.peak_gibibytes > 0
        assert 0.02 < record.fraction_of_floor() < 1.3
        assert record.both_spread < record.both
    ours = [record for record in run.records if record.provider == "liger_trainer"]
    eager = [record for record in run.records if record.provider == "torch"]
    assert sum(record.both for record in ours) < sum(record.both for record in eager)
    assert (tmp_path / "linear_cross_entropy-qwen3-30b-a3b-memory.png").is_file()
    assert (tmp_path / "rms_norm-qwen3-30b-a3b-tokens.png").is_file()


def test_memory_that_experts_save(tmp_path):
    arguments = ["moe_experts", "--model", "qwen3-30b-a3b", "--tokens", "2048", "--rounds", "2", "--seconds", "120"]
    assert main(["bench", *arguments, "--providers", "torch,liger_trainer", "--output", str(tmp_path)]) == 0
    records = {(r.variant, r.provider): r for r in Run.read(tmp_path / "results.json").records}
    rows, hidden, intermediate = 8, 2048, 768  # of a token
    for variant in ("", "frozen", "skewed"):
        stock, ours = (records[variant, name] for name in ("torch", "liger_trainer"))
        # gathered input and output, gate and up, activation, product; of frozen experts neither input nor product
        kept = 3 * intermediate + hidden if variant == "frozen" else 4 * intermediate + 2 * hidden
        assert stock.saved_gibibytes * 2**30 / 2048 == pytest.approx(2 * rows * kept, rel=0.05)
        assert ours.saved_gibibytes * 2**30 / 2048 == pytest.approx(2 * rows * 2 * intermediate, rel=0.02)
        assert ours.gradient_error() < 2e-2


def test_training_steps(tmp_path):
    sizes = ["--model", "tiny", "--batch", "1", "--length", "64", "--steps", "3", "--output", str(tmp_path)]
    assert main(["bench", "training", "--providers", "hf,liger_trainer", *sizes]) == 0
    hugging_face, ours = Run.read(tmp_path / "results.json").training
    for record in (hugging_face, ours):
        assert record.failure == ""
        assert record.peak_gibibytes > 0
    assert ours.losses == pytest.approx(hugging_face.losses, abs=0.02)
