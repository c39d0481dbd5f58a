"""What tests draw depends on their names alone, and `python -m tests.seeds` says which bounds are close."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests import seeds
from tests.forked import ROOT, run
from tests.seeding import seed


def draws() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def print_draws() -> None:
    print(json.dumps(draws()))


AT_IMPORT = draws()


@pytest.fixture(scope="module")
def shared() -> list[float]:
    return draws()


@pytest.mark.parametrize("time", ["first", "second"])
def test_draws_are_those_of_the_name(request, shared, time):
    drawn = draws()
    seed(request.node.nodeid)
    assert drawn == draws()
    seed("tests/test_seeding.py", "shared", 0)
    assert shared == draws()
    seed("tests/test_seeding.py")
    assert draws() == AT_IMPORT


def test_forked_processes_draw_from_the_seed_of_the_test():
    forked = json.loads(run(print_draws).stdout)
    seed(torch.initial_seed())
    assert forked == draws()


# Comparisons whose shares are known: what the tool is tried on.


@pytest.mark.parametrize("share", [0.9, 0.1])
def test_example_of_close(share):
    torch.testing.assert_close(torch.tensor([0.0, share * 1e-5]), torch.zeros(2), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.rand(3), torch.rand(3), rtol=0, atol=1e5)


def test_example_of_draws():
    explicit = torch.rand((), generator=torch.Generator().manual_seed(0))
    assert 0 < torch.rand(()) <= 100 + explicit


def record_of(tmp_path, *arguments):
    file = tmp_path / "record.json"
    command = [sys.executable, "-m", "tests.seeds", "--record", str(file), *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    return done.stdout, json.loads(file.read_text()), file.read_bytes()


def test_the_tool_reports_bounds_at_the_edge(tmp_path):
    arguments = ["tests/test_seeding.py", "-k", "example"]
    said, record, written = record_of(tmp_path, "--seeds", "10", "--order", "1", *arguments)
    (line,) = (line for line in said.splitlines() if "of what is allowed" in line)
    assert line.startswith("0.900 of what is allowed (median 0.900, 10 seeds) at tests/test_seeding.py:")
    assert line.endswith("test_example_of_close[0.9]")
    assert "3 tests, 5 comparisons, 1 above a quarter" in said
    drawn = record["shares"]["tests/test_seeding.py::test_example_of_draws"]
    assert [len({*each.values()}) for each in drawn.values()] == [seeds.SCOUTS]  # it is far from its bounds
    assert record_of(tmp_path, "--seeds", "10", "--order", "2", *arguments)[2] == written


def test_the_share_of_a_bound():
    assert seeds.share_of(torch.tensor([1.0, -3.0]), torch.tensor([4.0, 1.0])) == 0.25
    assert seeds.share_of(0.5, 0.0) == float("inf")
    assert seeds.share_of(3, 4) is None
    near = torch.tensor([2.0, 2.5])
    assert seeds.share_of_close(near, torch.tensor([2.0, 2.0]), 0.5, 1.0) == 0.25
    assert seeds.share_of_close(near, near, 0, 0) is None
    assert list(seeds.shares_of_approx([1.0, 2.5], pytest.approx([1.0, 2.0], abs=1.0))) == [0.0, 0.5]
    assert list(seeds.shares_of_approx({"a": 2.5, "b": 1}, {"a": pytest.approx(2.0, abs=1.0), "b": 1})) == [0.5]


@pytest.mark.parametrize(("code", "places"), [("assert 0.5 <= x < 2", 2), ("assert all(e < 2 for e in [x])", 1)])
@pytest.mark.parametrize("x", [1.0, 3.0])
def test_an_assert_means_the_same(monkeypatch, code, places, x):
    seen = []
    monkeypatch.setattr(seeds, "_record", lambda *each: seen.append(each))
    tree = seeds._Asserts(str(ROOT / "tests" / "test_x.py")).visit(ast.parse(code))
    if x > 2:
        with pytest.raises(AssertionError):
            exec(compile(tree, "code", "exec"), {"x": x})
    else:
        exec(compile(tree, "code", "exec"), {"x": x})
    assert seen[-1] == ("tests/test_x.py:1", x / 2)
    assert len(seen) == places
