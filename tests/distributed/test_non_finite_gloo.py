"""What one process alone has seen is decided by all: two gloo processes, of which one has a loss that is not finite."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import TrainerState

from liger_trainer.callbacks.finite import observe
from liger_trainer.callbacks.non_finite import NonFiniteError, NonFiniteGuardCallback

NORMS = ["a weight"]


def _loss_of_one(rank: int) -> None:
    observed = observe(1, [torch.tensor(float("nan") if rank else 1.0)], None, "cpu")
    assert observed is not None
    assert observed.flag


def _shard_of_one(rank: int) -> None:
    observed = observe(1, [torch.tensor(1.0)], (NORMS, torch.tensor([1.0 if rank else float("inf")])), "cpu")
    assert observed is not None
    assert observed.flag


def _nothing_seen_by_one(rank: int) -> None:
    losses = [torch.tensor(float("nan"))] if rank else []
    observed = observe(1, losses, None, "cpu")
    assert observed is not None
    assert observed.flag


def _all_finite(rank: int) -> None:
    observed = observe(1, [torch.tensor(1.0)], (NORMS, torch.tensor([2.0])), "cpu")
    assert observed is not None
    assert not observed.flag


def _shard_of_a_parameter(rank: int) -> None:
    model, guard = torch.nn.Linear(4, 4), NonFiniteGuardCallback()
    mesh = init_device_mesh("cpu", (2,))
    model.weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    args, state = SimpleNamespace(device=torch.device("cpu"), output_dir="nowhere"), TrainerState(global_step=5)
    guard.check_before_save(model, args, state, alike=True)
    with torch.no_grad():
        if rank:
            model.weight.to_local()[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="Stopped at step 5, rank 1: parameter 'weight' is not finite"):
        guard.check_before_save(model, args, state, alike=True)
    with pytest.raises(NonFiniteError) if rank else contextlib.nullcontext():  # the other makes no such call
        guard.check_before_save(model, args, state, alike=False)


CASES = {
    "a shard of a parameter": _shard_of_a_parameter,
    "a loss": _loss_of_one,
    "a shard of the gradients": _shard_of_one,
    "a process without a loss": _nothing_seen_by_one,
    "all finite": _all_finite,
}


@pytest.mark.parametrize("case", CASES)
def test_processes_decide_alike(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
