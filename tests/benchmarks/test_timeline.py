"""Timelines: what overlaps counts once, times begin at the first kernel, and the picture is drawn from a file."""

import json

import pytest
import torch

from liger_trainer.benchmarks import timeline
from liger_trainer.benchmarks.timeline import Timeline, main, merged


def test_intervals_that_overlap_or_are_near_are_one():
    assert merged([(5, 7), (0, 2), (1, 3), (10, 11)]) == [(0, 3), (5, 7), (10, 11)]
    assert merged([(0, 10), (2, 3), (11, 12)], 1.0) == [(0, 12)]
    assert merged([]) == []


def test_a_timeline():
    line = Timeline.of(2, 0.001, [(1500.0, 1600.0), (1000.0, 1050.0), (1040.0, 1100.0), (1610.0, 1710.0)])
    assert line.milliseconds == pytest.approx(0.5)
    assert line.busy == pytest.approx(0.3)  # 100 + 100 + 100 of 1,000 microseconds
    assert line.kernels == [(0, 100), (500, 710)]
    assert line.up_to(0.4).kernels == [(0, 100)]
    assert Timeline.of(1, 1.0, []).kernels == []


def test_a_picture_of_a_file(tmp_path):
    lines = {"hf": Timeline(2.0, 0.1, [(0, 100), (900, 1000)]), "liger_trainer": Timeline(1.0, 0.5, [(0, 500)])}
    file = tmp_path / "found.json"
    file.write_text(json.dumps({"setting": {"device": "GPU"}, "lines": lines}))
    main(["--plot", str(file)])
    assert (tmp_path / "found.png").stat().st_size > 1000


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit) as error:
        main([])
    assert error.value.code == 2
    assert "there is no CUDA device to profile" in capsys.readouterr().err


def test_a_wrong_provider_is_said_before_one_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(timeline, "find_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(timeline, "profiled", lambda *args: pytest.fail("measured"))
    with pytest.raises(SystemExit) as error:
        main(["--providers", "hf,liger_trianer"])
    assert error.value.code == 2
    assert "liger_trianer" in capsys.readouterr().err


@pytest.mark.gpu
def test_steps_on_a_gpu(tmp_path, capsys):
    options = ["--model", "tiny", "--steps", "2", "--warmup", "2", "--length", "64", "--providers", "liger_trainer"]
    main([*options, "--output", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    milliseconds, busy, kernels = found["lines"]["liger_trainer"]
    assert 0 < busy < 1
    assert kernels[0][0] == 0
    assert kernels[-1][0] < milliseconds * 1e3
    assert timeline.Timeline(milliseconds, busy, kernels)
