"""The block floating point sum of a head's weight gradient at real shapes, and its two kernels against each other."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from liger_trainer.kernels.head import weight_gradient
from liger_trainer.kernels.head.weight_gradient import WeightGradientSum, hopper_launch, launch, launch_for
from liger_trainer.kernels.runtime import INTERPRETED

pytestmark = pytest.mark.gpu

MIB = 2**20
KERNELS = {"plain": launch, "hopper": hopper_launch()}


@pytest.fixture(autouse=True)
def _no_synchronisation():
    if not torch.cuda.is_available() or INTERPRETED or launch_for(torch.device("cuda", 0)) is None:
        pytest.skip("needs a GPU with a bulk copy engine (Hopper or later)")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(params=KERNELS)
def kernel(request):
    if request.param == "hopper" and launch_for(torch.device("cuda", 0)) is launch:
        pytest.skip("needs a Hopper GPU and the Gluon of a Triton that the kernel is written for")
    with mock.patch.object(weight_gradient, "launch_for", return_value=KERNELS[request.param]):
        yield


def chunks_of(chunks, tokens, vocab_size, hidden_size, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    padded = -(-vocab_size // 8) * 8  # rows of the gradient start at multiples of 16 bytes

    def part():
        left = torch.randn(tokens, padded, generator=generator, device="cuda", dtype=dtype)
        right = torch.randn(tokens, hidden_size, generator=generator, device="cuda", dtype=dtype)
        return left[:, :vocab_size], right

    return [part() for _ in range(chunks)]


def summed(parts, kernels=()):
    (left, right), *_ = parts
    total = WeightGradientSum(left.new_empty(left.shape[1], right.shape[1]), len(parts))
    for index, part in enumerate(parts):
        if kernels:
            total.launch = kernels[index % len(kernels)]
        total.add(*part)
    total.finish()
    return total.weight_gradient


@pytest.mark.usefixtures("kernel")
def test_error_at_the_shape_of_llama_is_that_of_one_rounding():
    parts = chunks_of(3, 2048, 128256, 4096)
    gradient = summed(parts)
    rows = torch.arange(0, 128256, 499, device="cuda")
    exact = sum(left[:, rows].double().t() @ right.double() for left, right in parts)
    error, rounding = (gradient[rows] - exact).norm(), (exact.bfloat16() - exact).norm()
    assert error <= 1.01 * rounding


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3, 8), (64, 1001, 512), (200, 33000, 1288)], ids=str)
def test_kernels_give_the_same_bits_and_continue_each_others_sums(shape, dtype):
    """Their matmuls take the same steps of the same size in the same order, and what is stored has one format."""
    hopper = launch_for(torch.device("cuda", 0))
    if hopper is launch:
        pytest.skip("needs a Hopper GPU and the Gluon of a Triton that the kernel is written for")
    parts = chunks_of(4, *shape, dtype)
    plain = summed(parts, [launch])
    for kernels in ([hopper], [hopper, launch], [launch, hopper]):
        assert torch.equal(summed(parts, kernels), plain)


@pytest.mark.usefixtures("kernel")
def test_two_runs_are_equal():
    parts = chunks_of(3, 704, 20000, 1024)
    assert torch.equal(summed(parts), summed(parts))


@pytest.mark.usefixtures("kernel")
def test_cuda_graph_replays_on_new_inputs():
    parts = chunks_of(2, 200, 5000, 520)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        summed(parts)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = summed(parts)
    for _, right in parts:
        right.copy_(right.flip(1))
    graph.replay()
    assert torch.equal(captured, summed(parts))


@pytest.mark.usefixtures("kernel")
def test_nothing_synchronises():
    parts = chunks_of(3, 200, 5000, 520)
    summed(parts)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    summed(parts)


@pytest.mark.usefixtures("kernel")
def test_peak_memory_is_the_gradient_and_its_exponents():
    parts = chunks_of(3, 256, 32000, 2048)
    summed(parts)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    summed(parts)
    assert torch.cuda.max_memory_allocated() - before <= 32000 * 2048 * (2 + 1 / 128) + MIB
