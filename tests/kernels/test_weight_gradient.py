"""How a head's weight gradient is summed over chunks, and its kernel compiled for every GPU."""

from unittest import mock

import pytest
import torch

from liger_trainer.kernels import weight_gradient
from liger_trainer.kernels.weight_gradient import MAX_HALF_CHUNKS, WeightGradientSum
from tests.aot import TARGETS, compile_launch, recorded_launches


def chunk(tokens, vocab_size, hidden_size, dtype, device="cpu"):
    return (
        torch.randn(tokens, vocab_size, device=device).to(dtype),
        torch.randn(tokens, hidden_size, device=device).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("chunks", [1, 2, MAX_HALF_CHUNKS + 1])
def test_sum_over_chunks(dtype, chunks, device):
    torch.manual_seed(0)
    parts = [chunk(5, 24, 16, dtype, device) for _ in range(chunks)]
    exact = sum(left.double().t() @ right.double() for left, right in parts)
    total = WeightGradientSum(torch.full((24, 16), float("nan"), dtype=dtype, device=device), chunks)
    for left, right in parts:
        total.add(left, right)
    total.finish()
    error = (total.weight_gradient.double() - exact).norm() / exact.norm()
    rounding = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
    # One rounding a chunk while the sum is half precision, one in all where it is kept in fp32.
    assert error <= rounding * (chunks**0.5 if chunks <= MAX_HALF_CHUNKS else 1)


def test_memory_of_the_sum():
    """In dW itself, but in an fp32 tensor where a half-precision sum would round too often."""
    for dtype, chunks, own in (
        (torch.bfloat16, 1, True),
        (torch.bfloat16, MAX_HALF_CHUNKS, True),
        (torch.bfloat16, MAX_HALF_CHUNKS + 1, False),
        (torch.float16, MAX_HALF_CHUNKS + 1, False),
        (torch.float64, 99, True),
    ):
        total = WeightGradientSum(torch.empty(4, 4, dtype=dtype), chunks)
        assert (total.total is total.weight_gradient) == own
        assert total.exponents is None


def test_every_chunk_is_added():
    total = WeightGradientSum(torch.empty(8, 8), 2)
    total.add(*chunk(3, 8, 8, torch.float32))
    with pytest.raises(AssertionError, match="every chunk"):
        total.finish()


def launches_of(dtype):
    with mock.patch.object(weight_gradient, "_kernel_serves", return_value=True), recorded_launches() as launches:
        total = WeightGradientSum(torch.empty(256, 512, dtype=dtype), 3)
        assert total.exponents is not None
        for _ in range(3):
            total.add(*chunk(64, 256, 512, dtype))
    return launches


@pytest.mark.parametrize("target", [target for target in TARGETS if target.startswith("sm_")])
def test_compiles_ahead_of_time(target):
    launches = launches_of(torch.bfloat16)
    assert [(launch.arguments["ADD"], launch.arguments["KEEP"]) for launch in launches] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    for launch in launches if target == "sm_90" else launches[1:2]:
        assert compile_launch(launch, target)


def test_kernel_uses_the_tensor_cores_and_the_copy_engine():
    assembly = compile_launch(launches_of(torch.float16)[1], "sm_90").asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in assembly
    assert "cp.async.bulk.tensor.2d.shared" in assembly
    assert "cp.async.bulk.tensor.2d.global" in assembly
    assert "cvt.rn.f32.s" not in assembly  # an eighth of the speed of the additions used instead
