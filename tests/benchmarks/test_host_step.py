"""The benchmark of the host's part of a step finds every part of it, and counts the walks."""

import pytest

from liger_trainer.benchmarks import host_step, timeline
from liger_trainer.benchmarks.host_step import WORK, profiled


@pytest.mark.filterwarnings("ignore")
def test_the_parts_of_a_step():
    theirs, walks = profiled(2, False, 1)
    ours, few = profiled(2, True, 1)
    assert [*theirs] == [*ours] == [*WORK]
    assert all(part >= 0 for part in (*theirs.values(), *ours.values()))
    assert theirs["the backward"] > 1000
    assert ours["the mode of every module"] < theirs["the mode of every module"] / 20
    assert few < walks / 20


@pytest.mark.parametrize("benchmark", [host_step, timeline])
def test_no_steps(benchmark, tmp_path, capsys):
    output = ["--output", str(tmp_path / "timeline.json")] if benchmark is timeline else []
    with pytest.raises(SystemExit) as error:
        benchmark.main(["--steps", "0", *output])
    assert error.value.code == 2
    assert "argument --steps: 0 is not a whole number of 1 or more" in capsys.readouterr().err
