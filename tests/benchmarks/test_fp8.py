"""The benchmark of learning in fp8: runs of a seed differ in the arithmetic alone; the verdict is that of the rule."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.benchmarks import fp8
from liger_trainer.benchmarks.evidence.results import SETTING, Evidence, Value
from liger_trainer.benchmarks.fp8 import BF16, VARIANTS, section, verdict
from liger_trainer.benchmarks.small_llama import Sizes, pretrain

CPU = torch.device("cpu")
TINY = Sizes(hidden=64, layers=3, rows=4, length=32, steps=6, held_out=1, seeds=2)
HALVES = "bf16, two micro-batches"
IN_FP8 = [name for name, (mode, _) in VARIANTS.items() if mode]


@pytest.fixture(scope="module")
def results(small_corpus):
    """The values of all runs."""
    return [*fp8.compare(TINY, CPU, Evidence([]), lambda line: None)][-1]


def test_runs_of_a_seed_differ_in_the_arithmetic_alone(results):
    assert results.variants == [*VARIANTS]
    for seed in (0, 1):
        of_bf16, halves = (results.of(name, seed, "step loss") for name in (BF16, HALVES))
        assert halves == pytest.approx(of_bf16, rel=1e-3)
        assert halves != of_bf16
        for name in IN_FP8:
            losses = results.of(name, seed, "step loss")
            assert losses[0] == pytest.approx(of_bf16[0], rel=2.5e-3)  # fp8 rounds 128 tokens: up to 1e-3
            assert losses != pytest.approx(of_bf16, rel=1e-6)
            assert 0 < abs(results.score(name, seed, "loss") - results.score(BF16, seed, "loss")) < 0.05
    first, second = (results.of(BF16, seed, "step loss") for seed in (0, 1))
    assert first != pytest.approx(second, rel=2.5e-3)  # other weights and rows
    assert first[-1] < 0.98 * first[0]


def test_seeds_end_with_the_same_rows(monkeypatch):
    seen = []
    monkeypatch.setattr(fp8, "_run", lambda name, seed, rows, *_: seen.append(rows) or [Value(name, seed, "x", 0, 0.0)])
    monkeypatch.setattr(Evidence, "score", lambda *_: 0.0)
    assert len([*fp8.compare(TINY, CPU, Evidence([]), lambda line: None)]) == len(seen) == 2 * len(VARIANTS)
    first, second = seen[0], seen[-1]
    assert torch.equal(first[-4:], second[-4:])  # of the last step of six
    assert not any(torch.equal(a, b) for a, b in zip(first[:-4], second[:-4]))


def test_what_is_measured_is_the_plain_model_in_fp32(monkeypatch):
    trained, pretrain = [], fp8.pretrain
    monkeypatch.setattr(fp8, "pretrain", lambda model, *rest: trained.append(model) or pretrain(model, *rest))
    rows = torch.randint(256, (8, 1, 33), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    runs = [[value.value for value in fp8._run(IN_FP8[0], seed, rows, rows, TINY)] for seed in (0, 1)]
    tokens = rows.squeeze(1).long()
    for model, (*_, held_out) in zip(trained, runs):
        logits = model(input_ids=tokens[:, :-1]).logits
        assert held_out == pytest.approx(F.cross_entropy(logits.mT, tokens[:, 1:]).item(), rel=1e-6)
        assert not any("forward" in module.__dict__ for module in model.modules())
    assert runs[0][0] != runs[1][0]  # from other weights


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_any_number_of_steps(steps):
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(256))
    model.forward = lambda input_ids: SimpleNamespace(logits=model.weight.expand(*input_ids.shape, 256))
    losses = pretrain(model, torch.zeros(steps, 1, 3, dtype=torch.uint8), 1, 0.1)
    assert losses.shape == (steps,)
    assert losses[-1] < losses[0] or steps == 1


def test_runs_that_are_there_are_not_repeated(results):
    name = IN_FP8[-1]
    lacks = Evidence([value for value in results.values if (value.variant, value.seed) != (name, 1)])
    lines = []
    (again,) = fp8.compare(TINY, CPU, lacks, lines.append)
    assert again.of(name, 1, "step loss") == results.of(name, 1, "step loss")
    assert len(lines) == 1
    assert lines[0].startswith(f"{name}, seed 1: held-out loss ")


def evidence(away, away_at_end=(0.0, 0.0)):
    """Two seeds of six steps, whose bf16 differs by 0.2, so that the noise is 0.1414; a variant is off by `away`."""
    known = {"device": "a device", "torch": "2.0", "command": "a command"}
    sizes = {"hidden": "64", "layers": "3", "rows": "4", "length": "32", "steps": "6"}
    values = [Value(SETTING, 0, name, 0, word) for name, word in (known | sizes).items()]
    for name, held_out, at_end in ((BF16, (0.0, 0.0), (0.0, 0.0)), ("fp8, any", away, away_at_end)):
        for seed in (0, 1):
            steps = [9.0] * 5 + [2.0 + 0.2 * seed + at_end[seed]]
            values += [Value(name, seed, "step loss", step, loss) for step, loss in enumerate(steps, 1)]
            values.append(Value(name, seed, "held-out loss", 0, 3.0 + 0.2 * seed + held_out[seed]))
    return Evidence(values)


@pytest.mark.parametrize(
    ("away", "away_at_end", "expected"),
    [
        ((0.1, 0.1), (0.0, 0.0), "yes"),
        ((0.3, -0.1), (-0.1, -0.1), "yes"),
        ((0.15, 0.15), (0.0, 0.0), "no"),
        ((0.0, 0.0), (-0.2, -0.1), "no"),  # better is not the same
        ((math.nan, 0.0), (0.0, 0.0), "no"),
    ],
)
def test_the_verdict(away, away_at_end, expected):
    assert verdict(evidence(away, away_at_end), "fp8, any") == expected


def test_a_file_is_drawn_and_printed(tmp_path, capsys):
    file = tmp_path / "fp8.csv"
    found = evidence((0.1, 0.0))
    found.write(file)
    fp8.main(["--plot", str(file)])
    assert section(file) in capsys.readouterr().out
    assert (tmp_path / "fp8.png").stat().st_size > 10_000
    sentence, _, table, source = section(file).split("\n\n")
    assert sentence == (
        "3 layers of 64 features, 6 steps of 4 × 32 tokens, seeds 0, 1. The noise is 0.1414 in the held-out loss, "
        "0.1414 in that of the last 1 steps. Within it: fp8, any. Not: none."
    )
    assert table.splitlines()[2:] == [
        "| bf16 | 3.1000 |  |  | 2.1000 |  |  |  |",
        "| fp8, any | 3.1500 | +0.1000, +0.0000 | +0.0500 | 2.1000 | +0.0000, +0.0000 | +0.0000 | yes |",
    ]
    assert source == "<sub>a device, torch 2.0: `a command`</sub>"
    one = Evidence([value for value in found.values if value.seed == 0])
    assert verdict(one, "fp8, any") == "one seed"
    one.write(file)
    assert "noise is" not in section(file)
    fp8.main(["--plot", str(file)])


def test_a_command_adds_to_its_own_file_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fp8, "SMALL", TINY)
    asked = []

    def compare(sizes, device, found, tell):
        asked.append([*found.variants])
        yield Evidence([*found.values, *(value for value in evidence((0.0, 0.0)).values if value.variant != SETTING)])

    monkeypatch.setattr(fp8, "compare", compare)
    monkeypatch.setattr(fp8, "draw_fp8", lambda *_: None)
    command = ["--output", str(tmp_path), "--small", "--device", "cpu"]
    fp8.main(command)
    fp8.main(command)
    assert asked == [[], [BF16, "fp8, any"]]
    assert Evidence.read(tmp_path / "fp8.csv").setting["hidden"] == "64"
    with pytest.raises(SystemExit, match="has runs with steps 6, now it is 7; give another --output"):
        fp8.main([*command, "--steps", "7"])
    monkeypatch.setattr(fp8, "has_fp8", lambda device: False)
    with pytest.raises(SystemExit, match="CPU has no matmuls in fp8"):
        fp8.main(command)
