"""The activations' kernels that add adapters' products: against float64 (ranks, strides, partial tiles), compiled."""

from __future__ import annotations

import math

import pytest
import torch

from liger_trainer.kernels.lora import lora_gated_kernels as kernels
from liger_trainer.kernels.lora.lora_gated_kernels import LowRank
from tests.accuracy import seeded_randn
from tests.aot import compile_launch, on_targets, recorded_launches

ROWS, COLUMNS = 70, 75


@pytest.fixture
def several_tiles_a_program(monkeypatch):
    for name in ("_FORWARD", "_BACKWARD"):
        monkeypatch.setattr(kernels, name, kernels.LaunchConfig(16, 32, 4, 3, 1))
    monkeypatch.setattr(kernels, "num_sms", lambda device: 8)  # two programs for a column of five tiles


def low_rank(rows, rank, seed, dtype, device):
    """Columns of a `z` shared with another adapter, and a transposed parameter; None without a rank."""
    if rank is None:
        return None
    z = seeded_randn(rows, rank + 3, seed=seed, dtype=dtype, device=device, scale=0.3)[:, 3:]
    return LowRank(z, seeded_randn(COLUMNS, rank, seed=seed + 1, device=device, scale=0.3).T, 0.5)


def strided(rows, seed, dtype, device):
    return seeded_randn(rows, COLUMNS + 5, seed=seed, dtype=dtype, device=device)[:, :COLUMNS]


def plus(tensor, update):
    """The sum, with the matrix rounded to the dtype of z: that decides on which side of a clamp a value is."""
    if update is None:
        return tensor.double()
    z, matrix, scaling = update
    return tensor.double() + z.double() @ (scaling * matrix).to(z.dtype).double()


def truth(dh, gate, up, updates, limit):
    """H, and the gradients of gate and up, in float64."""
    dh, gate, up = (plus(*pair) for pair in zip((dh, gate, up), (updates[2], *updates[:2])))
    gate, up = gate.requires_grad_(), up.requires_grad_()
    h = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return h.detach(), *torch.autograd.grad(h, (gate, up), dh)


@pytest.mark.kernel
@pytest.mark.usefixtures("several_tiles_a_program")
@pytest.mark.parametrize("rows", [0, 1, 16, ROWS])
@pytest.mark.parametrize(
    "ranks", [(3, 3, 3), (16, None, 2), (None, 5, None), (None, None, None), (128, 40, 128)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_float64(dtype, ranks, rows, device):
    limit = 0.8 if rows == ROWS else math.inf
    updates = [low_rank(rows, rank, 10 * i, dtype, device) for i, rank in enumerate(ranks)]
    gate, up, dh = (strided(rows, 100 + i, dtype, device) for i in range(3))
    h, dgate, dup = truth(dh, gate, up, updates, limit)
    got = torch.full_like(gate, math.nan)
    kernels.launch_forward(gate, up, got, updates[:2], "silu", limit)
    error = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 4e-3}[dtype]  # h is rounded twice
    close = {"rtol": error, "atol": error, "check_dtype": False}
    torch.testing.assert_close(got, h.to(device), **close)
    kernels.launch_backward(dh, gate, up, updates, "silu", limit)
    for result, expected in ((dh, h), (gate, dgate), (up, dup)):
        torch.testing.assert_close(result, expected, **close)


@pytest.mark.kernel
@pytest.mark.usefixtures("several_tiles_a_program")
def test_nothing_is_written_beside_the_columns(device):
    whole = [torch.full((ROWS, COLUMNS + 5), 7.0, device=device) for _ in range(3)]
    dh, gate, up = (each[:, :COLUMNS] for each in whole)
    kernels.launch_backward(dh, gate, up, [low_rank(ROWS, 3, 0, torch.float32, device), None, None], "silu", math.inf)
    assert all((each[:, COLUMNS:] == 7).all() for each in whole)
    assert not any((each == 7).any() for each in (dh, gate, up))


def launches_of(dtype, rank):
    """A forward's and a backward's, on tensors that take no memory."""
    dh, gate, up = (torch.empty(1, dtype=dtype).expand(8192, 1024) for _ in range(3))
    z = torch.empty(1, dtype=dtype).expand(8192, rank)
    updates = [LowRank(z, torch.empty(1024, rank).T, 2.0) for _ in range(2)]
    updates.append(LowRank(z, torch.empty(rank, 1024), 1.0))
    with recorded_launches() as launches:
        kernels.launch_forward(gate, up, dh, updates[:2], "silu", math.inf)
        kernels.launch_backward(dh, gate, up, updates, "silu", math.inf)
    return launches


# 99 KB is what the smallest of NVIDIA's cards give a block, 64 what AMD's do.
@pytest.mark.parametrize(
    ("target", "rank", "dtype"),
    [
        *on_targets((kernels.MAX_RANK, torch.bfloat16), (16, torch.bfloat16), (16, torch.float32)),
        *((target, kernels.MAX_RANK, torch.float32) for target in ("sm_80", "gfx942")),  # the most memory
    ],
    ids=str,
)
def test_compiles_ahead_of_time(target, rank, dtype):
    for launch in launches_of(dtype, rank):
        shared = compile_launch(launch, target).metadata.shared
        assert shared <= (64 if target.startswith("gfx") else 99) * 1024


def test_compiles_without_adapters():
    """Without updates no matmul is left: the arguments in their places are not read."""
    tensors = [torch.empty(1, dtype=torch.bfloat16).expand(8192, 1024) for _ in range(3)]
    with recorded_launches() as launches:
        kernels.launch_backward(*tensors, [None, None, None], "silu", math.inf)
    (launch,) = launches
    compiled = compile_launch(launch, "sm_90")
    assert "mma" not in compiled.asm["ptx"]
