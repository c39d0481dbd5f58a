"""DTensors in the norms and other operators of activations, on two gloo processes: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from liger_trainer import functional as ops
from tests.distributed.two_processes import WORLD
from tests.norm_cases import NORMS

PLACEMENTS = {"rows": Shard(0), "columns": Shard(-1), "whole": Replicate()}
ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "swiglu": ops.swiglu,
    "geglu": ops.geglu,
    "relu_squared": lambda gate, up: ops.relu_squared(gate) * up,
    "softmax": lambda gate, up: ops.softmax(gate) * up,
}


def _same(function: Callable[..., Any], tensors: list[torch.Tensor], split: set[int], placement: Any) -> None:
    """`function` of DTensors, those at `split` placed so and the others whole, is that of the tensors themselves."""
    mesh = init_device_mesh("cpu", (WORLD,))
    placed = [distribute_tensor(x, mesh, [placement if i in split else Replicate()]) for i, x in enumerate(tensors)]
    results = []
    for leaves in (tensors, placed):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        result = function(*leaves)
        y = result[0] if isinstance(result, tuple) else result
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for ours, expected in zip(results[1], results[0]):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), expected)


def _norm(rank: int, name: str, placement: Any) -> None:
    torch.manual_seed(0)
    tensors = NORMS[name].arguments((4, 6, 8), "cpu", torch.float32)
    same_shape = {index for index, tensor in enumerate(tensors) if tensor.shape == tensors[0].shape}
    _same(NORMS[name].function, tensors, same_shape, placement)


def _activation(rank: int, name: str, placement: Any) -> None:
    torch.manual_seed(0)
    _same(ACTIVATIONS[name], list(torch.randn(2, 4, 6, 8)), {0, 1}, placement)


def _mixed(rank: int, name: str) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    tensors = NORMS[name].arguments((4, 6, 8), "cpu", torch.float32)
    x = distribute_tensor(tensors[0], mesh, [Shard(-1)])
    with pytest.raises(ValueError, match=r"`x` of \w+ is a DTensor, but `\w+` is a plain tensor; .*distribute_tensor"):
        NORMS[name].function(x, *tensors[1:])
    others = [distribute_tensor(tensor, mesh, [Replicate()]) for tensor in tensors[1:]]
    with pytest.raises(ValueError, match=r"`\w+` of \w+ is a DTensor, but `x` is a plain tensor"):
        NORMS[name].function(tensors[0], *others)


def _group_norm(rank: int) -> None:
    tensors = NORMS["group_norm"].arguments((4, 6, 8), "cpu", torch.float32)
    mesh = init_device_mesh("cpu", (WORLD,))
    for index, name in enumerate(("x", "weight", "bias")):
        mixed = [distribute_tensor(t, mesh, [Replicate()]) if i == index else t for i, t in enumerate(tensors)]
        with pytest.raises(ValueError, match=rf"`{name}` of group_norm is a DTensor.*`{name}.full_tensor\(\)`"):
            NORMS["group_norm"].function(*mixed)


OF_ROWS = [name for name in NORMS if name != "group_norm"]
CASES = {
    **{f"{n}, {kind}": partial(_norm, name=n, placement=p) for n in OF_ROWS for kind, p in PLACEMENTS.items()},
    **{
        f"{n}, {kind}": partial(_activation, name=n, placement=p) for n in ACTIVATIONS for kind, p in PLACEMENTS.items()
    },
    **{f"{name}, mixed": partial(_mixed, name=name) for name in OF_ROWS},
    "group_norm": _group_norm,
}


@pytest.mark.parametrize("case", CASES)
def test_as_one_process_or_refused(case: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[case], outcomes[case]
