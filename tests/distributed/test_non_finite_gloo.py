"""What one process alone has seen is decided by all: two gloo processes, of which one has a loss that is not finite."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist

if not dist.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from liger_trainer.callbacks.non_finite import _observe
from tests.distributed.two_processes import failures_of, run_gloo_cases

NORMS = ["a weight"]


def _loss_of_one(rank: int) -> None:
    observed = _observe(1, [torch.tensor(float("nan") if rank else 1.0)], None, "cpu")
    assert observed is not None
    assert observed.flag


def _shard_of_one(rank: int) -> None:
    observed = _observe(1, [torch.tensor(1.0)], (NORMS, torch.tensor([1.0 if rank else float("inf")])), "cpu")
    assert observed is not None
    assert observed.flag


def _nothing_seen_by_one(rank: int) -> None:
    losses = [torch.tensor(float("nan"))] if rank else []
    observed = _observe(1, losses, None, "cpu")
    assert observed is not None
    assert observed.flag


def _all_finite(rank: int) -> None:
    observed = _observe(1, [torch.tensor(1.0)], (NORMS, torch.tensor([2.0])), "cpu")
    assert observed is not None
    assert not observed.flag


CASES = {
    "a loss": _loss_of_one,
    "a shard of the gradients": _shard_of_one,
    "a process without a loss": _nothing_seen_by_one,
    "all finite": _all_finite,
}


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return failures_of(partial(run_gloo_cases, CASES))


@pytest.mark.parametrize("case", CASES)
def test_processes_decide_alike(case: str, failures: dict[str, str]) -> None:
    assert case not in failures, failures[case]
