"""The longest sequence: the search itself, what ends it, and a real one in processes."""

import pytest

from liger_trainer.benchmarks import training
from liger_trainer.benchmarks.records import LongestRecord, Run, TrainingRecord
from liger_trainer.benchmarks.training import OUT_OF_MEMORY, Task
from liger_trainer.tools.cli import main

TASK = Task("tiny", trainer="dpo", batch=1, length=1024, steps=2, lora=4)


@pytest.mark.parametrize(("limit", "tries"), [(5000, 7), (1024, 5), (700, 5), (100_000, 11), (1, 11), (0, 11)])
def test_search(limit, tries):
    tried = {}
    training.search(lambda length: tried.setdefault(length, length <= limit), 1024)
    good = max((length for length, trains in tried.items() if trains), default=0)
    bad = min(length for length, trains in tried.items() if not trains)
    assert good <= limit < bad
    assert bad - good <= max(good // 8, 1)
    assert len(tried) == tries


def records(outcomes):
    """Replaces the processes by the failure of each length."""

    def run_provider(task, provider, provider_file, seconds):
        failure = outcomes(task.length)
        record = TrainingRecord("tiny", 0, "dpo", 1, task.length, True, provider, failure=failure, lora=task.lora)
        if not failure:
            record.tokens_per_second, record.peak_gibibytes = 10.0, task.length / 1024
        return record

    return run_provider


def test_the_record_is_of_the_longest_that_trained(monkeypatch):
    lines = []
    monkeypatch.setattr(training, "run_provider", records(lambda length: "" if length <= 2500 else OUT_OF_MEMORY))
    found = training.find_longest(TASK, "hf", tell=lines.append)
    assert (found.length, found.too_long, found.peak_gibibytes) == (2304, 2560, 2304 / 1024)
    assert list(found.tries) == ["1024", "2048", "4096", "3072", "2560", "2304"]
    assert found.tries["1024"] == "trains, 10 tokens/s, 1.0 GiB"
    assert found.tries["4096"] == OUT_OF_MEMORY
    assert len(lines) == 6
    work = found.model, found.layers, found.trainer, found.batch, found.lora, found.provider
    assert work == ("tiny", 0, "dpo", 1, 4, "hf")


@pytest.mark.parametrize("failure", ["no result in 3 s", "TypeError: unexpected keyword"])
def test_another_failure_ends_the_search(failure, monkeypatch):
    monkeypatch.setattr(training, "run_provider", records(lambda length: "" if length <= 2500 else failure))
    found = training.find_longest(TASK, "hf", tell=lambda text: None)
    assert (found.length, found.too_long) == (2048, None)
    assert found.tries["4096"] == failure


def test_no_time(monkeypatch):
    monkeypatch.setattr(training, "run_provider", records(lambda length: ""))
    assert training.find_longest(TASK, "hf", seconds=-1.0, tell=lambda text: None).tries == {}


FULL_BEYOND_2 = """
import torch
from liger_trainer.benchmarks.training_step import training_provider

@training_provider("small")
def small(setup):
    if setup.task.length > 2:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return setup.trainer(ours=True, liger_kernel_config={"tiled_mlp": True})
"""


def test_processes(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(FULL_BEYOND_2)
    sizes = ["--layers", "1", "--lora", "2", "--length", "4", "--device", "cpu"]
    mine = ["--providers", "small", "--provider_file", str(tmp_path / "mine.py"), "--output", str(tmp_path)]
    assert main(["bench", "longest", *sizes, *mine]) == 0
    assert "small: 2 tokens, trains, " in capsys.readouterr().out
    (found,) = Run.read(tmp_path / "results.json").longest
    assert isinstance(found, LongestRecord)
    assert found.tries["4"] == OUT_OF_MEMORY
    assert (found.length, found.too_long, found.trainer, found.batch, found.lora) == (2, 3, "dpo", 1, 2)
    assert main(["bench", "longest", "rms_norm"]) == 2
