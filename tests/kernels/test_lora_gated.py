"""The activation's kernels that add adapters' products, compiled for every GPU."""

from __future__ import annotations

import math

import pytest
import torch

from liger_trainer.kernels.lora import lora_gated_kernels as kernels
from liger_trainer.kernels.lora.lora_gated_kernels import LowRank
from tests.aot import TARGETS, compile_launch, recorded_launches

ROWS, COLUMNS = 8192, 1024


def launches_of(dtype, rank):
    """A forward's and a backward's, on tensors that take no memory."""
    dh, gate, up = (torch.empty(1, dtype=dtype).expand(ROWS, COLUMNS) for _ in range(3))
    z = torch.empty(1, dtype=dtype).expand(ROWS, rank)
    updates = [LowRank(z, torch.empty(COLUMNS, rank).T, 2.0) for _ in range(2)]
    updates.append(LowRank(z, torch.empty(rank, COLUMNS), 1.0))
    with recorded_launches() as launches:
        kernels.launch_forward(gate, up, dh, updates[:2], "silu", math.inf)
        kernels.launch_backward(dh, gate, up, updates, "silu", math.inf)
    return launches


# 99 KB is what the smallest of NVIDIA's cards give a block, 64 what AMD's do.
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rank", [16, kernels.MAX_RANK])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiles_ahead_of_time(target, rank, dtype):
    for launch in launches_of(dtype, rank):
        shared = compile_launch(launch, target).metadata.shared
        assert shared <= (64 if target.startswith("gfx") else 99) * 1024


def test_compiles_without_adapters():
    """What an update that is not there stands in for is not read: no multiplication is left."""
    tensors = [torch.empty(1, dtype=torch.bfloat16).expand(ROWS, COLUMNS) for _ in range(3)]
    with recorded_launches() as launches:
        kernels.launch_backward(*tensors, [None, None, None], "silu", math.inf)
    (launch,) = launches
    compiled = compile_launch(launch, "sm_90")
    assert "mma" not in compiled.asm["ptx"]
