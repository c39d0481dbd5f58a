"""The benchmark of optimizers: runs differ in the optimizer and the order alone, and its numbers say by how much."""

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from liger_trainer.benchmarks import optimizers
from liger_trainer.benchmarks.evidence.results import Evidence
from liger_trainer.benchmarks.optimizers import FP32, OPTIMIZERS, Bench
from liger_trainer.benchmarks.small_llama import Sizes

CPU = torch.device("cpu")
TINY = Sizes(hidden=256, layers=1, rows=4, length=16, pretraining=2, steps=8, held_out=1, seeds=1)
SETTINGS = {"device": "a device", "command": "a command"}
OTHERS = {"bitsandbytes AdamW8bit": "bitsandbytes", "torchao AdamW8bit, stochastic": "torchao"}


@pytest.fixture(scope="module")
def results(small_corpus):
    """The values of every optimizer of torch and ours, and the lines on the way."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        for package in OTHERS.values():
            patch.setitem(sys.modules, package, None)
            patch.setitem(sys.modules, f"{package}.optim", None)
        return [*optimizers.compare(TINY, CPU, Evidence.begin(SETTINGS), lines.append)][-1], lines


def last(found):
    """What was measured at the end of a run, by task and name."""
    ends = {}
    for value in found.values:
        if value.index == TINY.steps:
            task, measure = value.measure.split()
            ends.setdefault((task, value.variant), SimpleNamespace()).__dict__[measure] = value.value
    return ends


def test_fp32_is_followed_and_rounding_to_nearest_is_not(results):
    found = last(results[0])
    assert set(found) == {(task, name) for task in ("SFT", "DPO") for name in OPTIMIZERS if name not in OTHERS}
    for (task, name), point in found.items():
        aim, nearest = found[task, FP32], found[task, "AdamW, bf16 weights"]
        assert nearest.changed < 0.5 * aim.changed
        assert nearest.distance > 0.8
        if name.startswith("Liger") and "stochastic" not in name:
            assert point.distance < 0.2
            assert point.changed == pytest.approx(aim.changed, rel=0.1)
            assert point.loss == pytest.approx(aim.loss, abs=5e-4)  # to nearest, SFT is 0.11 away
            assert point.trained_loss == pytest.approx(aim.trained_loss, abs=2e-4)
            assert point.changed_fp32 == pytest.approx(aim.changed_fp32, rel=0.01)
        if "stochastic" in name:
            assert point.changed == point.changed_fp32 > aim.changed / 2


def test_every_run_starts_alike(results):
    for task, loss in (("SFT", None), ("DPO", math.log(2))):
        losses = {value.value for value in results[0].values if (value.measure, value.index) == (f"{task} loss", 0)}
        assert len(losses) == 1
        if loss is not None:
            assert losses.pop() == pytest.approx(loss)


def test_what_is_left_out_is_named(results):
    for name, package in OTHERS.items():
        assert [line for line in results[1] if name in line] == [
            f"{task}, {name}: skipped: {package} is not installed" for task in ("SFT", "DPO")
        ]


def test_the_seed_is_the_order(small_corpus):
    start, _ = optimizers.pretrained(small_corpus["pretraining"], TINY, CPU)
    bench, task = Bench(TINY, start, CPU), optimizers.tasks(small_corpus, TINY, CPU)[1]
    (first, weights), (again, same), (_, other) = (bench.run(task, "LigerAdamW, 8bit", seed) for seed in (0, 0, 1))
    assert first == again
    assert torch.equal(weights, same)
    assert not torch.equal(weights, other)


def test_rejected_answers_have_typos():
    rows = torch.arange(4 * 61).view(4, 61).to(torch.uint8)
    chosen, rejected = optimizers._pairs(rows, torch.Generator().manual_seed(0)).unbind(1)
    assert torch.equal(chosen, rows)
    assert torch.equal(rejected[:, :31], rows[:, :31])
    assert (rejected != rows).any(1).all()
    assert torch.equal(rejected.sort(1).values, rows)
    assert (rejected.int() - rows.int()).abs().max() == 1


def test_a_file_is_drawn_and_printed(results, tmp_path, capsys):
    file = tmp_path / "optimizers.csv"
    results[0].write(file)
    read = Evidence.read(file)
    assert read.setting == SETTINGS
    kept, given = (
        {(value.variant, value.seed, value.measure, value.index): value.value for value in each.values if value.index}
        for each in (read, results[0])
    )
    assert kept == pytest.approx(given)
    optimizers.main(["--plot", str(file)])
    printed = capsys.readouterr().out
    assert all(printed.count(name) >= 2 for name in OPTIMIZERS if name not in OTHERS)
    assert (tmp_path / "optimizers.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "give either --output"), (["--output", "x", "--steps", "0"], "--steps is 0; it must be 1 or more")],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit):
        optimizers.main(arguments)
    assert message in capsys.readouterr().err
