"""The benchmark of the host's part of a step finds every part of it, and counts the walks."""

import pytest

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
