"""The embedding on the CPU, and its kernels compiled for every GPU."""

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.kernels.parity import embedding as operators
from liger_trainer.kernels.parity.embedding import embedding, embedding_backward_, tied_embedding
from tests.aot import TARGETS, compile_launch, recorded_launches


def test_float64_runs_as_reference(device):
    ids = torch.tensor([[0, 3], [3, 1]], device=device)
    weight = torch.randn(4, 5, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.equal(embedding(ids, weight, -1), F.embedding(ids, weight, -1))
    assert torch.autograd.gradcheck(lambda weight: embedding(ids, weight), weight)
    hidden, head = tied_embedding(ids, weight)
    assert head is weight
    there = torch.ones_like(weight)
    (expected,) = torch.autograd.grad(embedding(ids, weight, 3), weight, torch.ones_like(hidden))
    torch.testing.assert_close(embedding_backward_(there, torch.ones_like(hidden), ids, 3), 1 + expected)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_ahead_of_time(target, dtype):
    ids, weight = torch.zeros(64, dtype=torch.int64), torch.zeros(100, 1024, dtype=dtype)
    dy = torch.zeros(64, 1024, dtype=dtype)
    with recorded_launches() as launches:
        operators._embedding(ids, weight, -1)
        operators._embedding_backward(dy, ids.int(), 100, 3)
        operators._embedding_backward_(weight, dy, ids, -1)
    assert len(launches) == 7
    for launch in launches:
        compiled = compile_launch(launch, target)
        if target == "sm_90" and launch.kernel.fn.__name__ in ("_gather_kernel", "_sum_runs_kernel"):
            assert "ld.global.v4.b32" in compiled.asm["ptx"]
