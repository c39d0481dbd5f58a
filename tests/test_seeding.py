"""What a test, a shared fixture and a forked process draw depends on their names alone."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from tests.forked import run
from tests.seeding import seed


def draws() -> list[float]:
    return [torch.rand(()).item(), float(np.random.rand()), random.random()]


def print_draws() -> None:
    print(json.dumps(draws()))


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


def test_forked_processes_draw_from_the_seed_of_the_test():
    forked = json.loads(run(print_draws).stdout)
    seed(torch.initial_seed())
    assert forked == draws()
