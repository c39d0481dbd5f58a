"""What one process alone has seen is decided by all: two gloo processes, of which one has a loss that is not finite."""

from __future__ import annotations

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import TrainerState

from liger_trainer.callbacks.non_finite import NonFiniteError, NonFiniteGuardCallback, observe

NAN, INF = float("nan"), float("inf")


def _decide(rank: int, losses: list[list[float]], norms: list[float] | None = None, flag: bool = True) -> None:
    """What the ranks have seen, each its own, is one flag."""
    seen = None if norms is None else (["a weight"], torch.tensor([norms[rank]]))
    observed = observe(1, [torch.tensor(loss) for loss in losses[rank]], seen, "cpu")
    assert observed is not None
    assert observed.flag == flag


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
    "a loss": partial(_decide, losses=[[1.0], [NAN]]),
    "a shard of the gradients": partial(_decide, losses=[[1.0], [1.0]], norms=[INF, 1.0]),
    "a process without a loss": partial(_decide, losses=[[], [NAN]]),
    "all finite": partial(_decide, losses=[[1.0], [1.0]], norms=[2.0, 2.0], flag=False),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_decide_alike(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
