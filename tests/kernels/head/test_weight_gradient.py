"""How the weight gradient of a head is summed over chunks: errors, kernels, compilation for every GPU, memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import torch
import triton

from liger_trainer.kernels.head import linear_cross_entropy as operator
from liger_trainer.kernels.head import weight_gradient
from liger_trainer.kernels.head.head_chunks import HeadGradients, Needs, WeightGradientSum
from liger_trainer.kernels.head.large_first_chunk import PanelPlan
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.weight_gradient import (
    MAX_HALF_CHUNKS,
    hopper_launch,
    launch,
    launch_for,
)
from liger_trainer.kernels.runtime import INTERPRETED
from tests.aot import TARGETS, compile_launch, recorded_launches
from tests.device import captured, no_host_sync, peak_memory
from tests.kernels.head.heads import MIB, relative_error


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
    error = relative_error(total.weight_gradient, exact)
    rounding = torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
    # One rounding a chunk while the sum is half precision, one in all where it is in fp32.
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
        assert total.launch is None


def test_every_chunk_is_added():
    hidden, weight = torch.empty(6, 8), torch.empty(8, 8)
    gradients = HeadGradients(hidden, weight, None, Needs(False, True, False), 2)
    gradients.add(0, 3, torch.empty(3, 8))
    with pytest.raises(AssertionError, match="every chunk"):
        gradients.finish()


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((8, 0), triton.__version__, None),
        ((9, 0), triton.__version__, hopper_launch()),
        *(((9, 0), version, hopper_launch()) for version in ("3.6.0", "3.7.1", "3.8.0", "3.9.0")),  # the constraints'
        *(((9, 0), version, launch) for version in ("3.5.1", "3.10.0", "4.0.0")),  # on which Gluon was not tried
        ((10, 0), triton.__version__, launch),
        ((10, 3), triton.__version__, launch),
        ((12, 0), triton.__version__, None),
    ],
)
def test_kernel_of_a_device_and_a_triton(capability, version, expected):
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
        mock.patch.object(torch.version, "hip", None),
        mock.patch.object(triton, "__version__", version),
    ):
        assert launch_for.__wrapped__(torch.device("cuda", 0)) is expected


def test_without_gluon_there_is_no_kernel_for_hopper():
    with mock.patch.dict(sys.modules, {"liger_trainer.kernels.head.weight_gradient_gluon": None}):
        assert hopper_launch() is None


def launches_of(kernel, dtype):
    with mock.patch.object(weight_gradient, "launch_for", return_value=kernel), recorded_launches() as launches:
        total = WeightGradientSum(torch.empty(256, 512, dtype=dtype), 3)
        assert total.launch is not None
        for _ in range(3):
            total.add(*chunk(64, 256, 512, dtype))
    assert [(recorded.arguments["ADD"], recorded.arguments["KEEP"]) for recorded in launches] == [
        (False, True),
        (True, True),
        (True, False),
    ]
    return launches


@pytest.mark.parametrize("target", [target for target in TARGETS if target.startswith("sm_")])
def test_compiles_ahead_of_time(target):
    launches = launches_of(launch, torch.bfloat16)
    for recorded in launches if target == "sm_90" else launches[1:2]:
        assert compile_launch(recorded, target)


def test_kernel_uses_the_tensor_cores_and_the_copy_engine():
    assembly = compile_launch(launches_of(launch, torch.float16)[1], "sm_90").asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16" in assembly
    assert "cp.async.bulk.tensor.2d.shared" in assembly
    assert "cp.async.bulk.tensor.2d.global" in assembly
    assert "cvt.rn.f32.s" not in assembly  # an eighth of the speed of the additions used instead


@pytest.mark.skipif(hopper_launch() is None, reason="the kernel for Hopper is not written for this Triton's Gluon")
@pytest.mark.parametrize(
    ("state", "dtype"), [(0, "bf16"), (1, "bf16"), (2, "bf16"), (1, "f16")], ids=["first", "middle", "last", "in f16"]
)
def test_hopper_kernel_compiles_ahead_of_time(state, dtype, tmp_path):
    torch_dtype = torch.float16 if dtype == "f16" else torch.bfloat16
    compiled = compile_launch(launches_of(hopper_launch(), torch_dtype)[state], "sm_90")
    assembly = compiled.asm["ptx"]
    assert f"wgmma.mma_async.sync.aligned.m64n256k16.f32.{dtype}.{dtype}" in assembly
    assert re.search(r"setmaxnreg\.inc\S+\s+232;", assembly)  # a consumer's, above what all warps start with
    assert re.search(r"setmaxnreg\.dec\S+\s+40;", assembly)  # the producer's
    assert "cp.async.bulk.tensor.2d.shared" in assembly
    assert "cp.async.bulk.tensor.2d.global" in assembly
    assert compiled.metadata.shared <= 227 * 1024
    if not os.access(cuobjdump := triton.knobs.nvidia.cuobjdump.path, os.X_OK):
        return
    (tmp_path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [cuobjdump, "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"STACK:0 .*LOCAL:0 ", usage), usage  # nothing spills


# The kernels, under the interpreter or on a GPU.


SHAPES = [(70, 130, 264), (16, 8, 8), (1, 3, 520)]
if not INTERPRETED:  # steps of 64 tokens and the remainder, and many tiles for every multiprocessor
    SHAPES += [(64, 1001, 512), (65, 200, 1288), (192, 1000, 640), (200, 33000, 1288)]


KERNELS = ["plain"] if INTERPRETED else ["plain", "hopper"]


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.kernel) for name in KERNELS])
def kernel(request):
    """Both kernels in turn, in place of the one that is chosen for the device; marks the test `kernel`."""
    chosen = launch if INTERPRETED else launch_for(torch.device("cuda", 0))
    if chosen is None:
        pytest.skip("needs a GPU with a bulk copy engine (Hopper or later)")
    if request.param == "hopper" and chosen is launch:
        pytest.skip("needs a Hopper GPU and the Gluon of a Triton that the kernel is written for")
    selected = hopper_launch() if request.param == "hopper" else launch
    with mock.patch.object(weight_gradient, "launch_for", return_value=selected):
        yield


dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def chunks_of(chunks, tokens, vocab_size, hidden_size, dtype, device):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    # Rows of very different size, as those of frequent and rare words are.
    rows = torch.exp2(torch.linspace(-8, 4, vocab_size)).to(dtype).to(device)
    return [(randn(tokens, vocab_size) * rows, randn(tokens, hidden_size)) for _ in range(chunks)]


def summed(parts, kernels=()):
    """The sum over `parts`, each by the next of `kernels`, in turn; by default all by that of the device."""
    (left, right), *_ = parts
    total = WeightGradientSum(left.new_full((left.shape[1], right.shape[1]), float("nan")), len(parts))
    assert total.launch is not None
    for index, part in enumerate(parts):
        if kernels:
            total.launch = kernels[index % len(kernels)]
        total.add(*part)
    return total.weight_gradient


@pytest.mark.usefixtures("kernel")
@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_that_of_one_rounding(dtype, shape, device):
    parts = chunks_of(4, *shape, dtype, device)
    # Rows of the gradient start at multiples of 16 bytes, as in the head's padded buffer.
    parts = [(torch.nn.functional.pad(left, (0, -left.shape[1] % 8))[:, : left.shape[1]], x) for left, x in parts]
    exact = sum(left.double().t() @ right.double() for left, right in parts)
    gradient = summed(parts).double()
    # In every row by itself, however small it is beside the others.
    error, rounded = (gradient - exact).norm(dim=1), (exact.to(dtype).double() - exact).norm(dim=1)
    # The sum keeps 15 bits below the largest of a block: 7 more than bf16, 4 more than fp16.
    assert error.sum() <= (1.01 if dtype == torch.bfloat16 else 1.05) * rounded.sum()
    assert (error <= 1.1 * rounded + 1e-4 * exact.norm(dim=1)).all()


@pytest.mark.usefixtures("kernel")
@dtypes
@pytest.mark.parametrize("vocab_size", [36, 40])
def test_a_head_that_lies_transposed_in_memory(dtype, vocab_size, device):
    """Its gradient does too, which the copy engine cannot write; the sum is then taken as on other devices."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator).to(dtype).to(device)
    stored = torch.randn(16, vocab_size, generator=generator).to(dtype).to(device).requires_grad_()
    labels = torch.randint(0, vocab_size, (40,), generator=generator).to(device)

    def gradient(weight):
        loss = linear_cross_entropy(hidden, weight, labels, logits_memory=16 * 64 * 2)
        return torch.autograd.grad(loss, stored)[0].double()

    ours, expected = gradient(stored.t()), gradient(stored.t().contiguous())
    assert (ours - expected).norm() <= 0.01 * expected.norm()  # it rounds after each of the three chunks


@pytest.mark.usefixtures("kernel")
@dtypes
@pytest.mark.parametrize("chunks", [2, 3])
def test_a_first_chunk_in_panels_gives_the_same_bits(chunks, dtype, device):
    """Panels write only their own rows of dW and of the exponents; the logits' gradient may lie in the rows after."""
    parts = chunks_of(chunks, 16, 136, 264, dtype, device)
    whole = summed(parts)
    total = WeightGradientSum(torch.full((136, 264), float("nan"), dtype=dtype, device=device), chunks)
    (left, right), *others = parts
    for start, stop in ((0, 8), (8, 72), (72, 136)):
        memory = left.new_empty(16, 64)  # whose rows are longer than the panel
        if stop < 136:
            memory = total.weight_gradient[stop:].view(-1)[: memory.numel()].view_as(memory)
        panel = memory[:, : stop - start].copy_(left[:, start:stop])
        total.add(panel, right, start)
    assert total.added == 1
    for part in others:
        total.add(*part)
    assert torch.equal(total.weight_gradient, whole)


@pytest.mark.usefixtures("kernel")
@dtypes
def test_two_runs_are_equal(dtype, device):
    parts = chunks_of(3, 64, 40, 24, dtype, device)
    assert torch.equal(summed(parts), summed(parts))


@pytest.mark.usefixtures("kernel")
def test_large_small_and_zero_rows(device):
    left = torch.zeros(16, 24)
    left[0] = torch.tensor([0.0, 1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e30, 3e38] * 3)
    right = torch.ones(16, 8)
    parts = [
        (left.bfloat16().to(device), right.bfloat16().to(device)),
        (torch.zeros_like(left).bfloat16().to(device),) * 2,
    ]
    parts[1] = (parts[1][0], right.bfloat16().to(device))
    gradient = summed(parts)
    expected = left[0].bfloat16().to(device)[:, None].expand(-1, 8)
    # The smallest unit of a block is the smallest normal number: below it there is nothing to keep.
    torch.testing.assert_close(gradient, expected, rtol=0, atol=2.0**-126)


@pytest.mark.usefixtures("kernel")
@dtypes
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_that_carries_into_the_next_power(sign, dtype, device):
    """2 - 2**-17 is 32768 units less an eighth: as the integer that it rounds to it would wrap around to -2."""
    left, right = torch.zeros(16, 8, dtype=dtype, device=device), torch.zeros(16, 8, dtype=dtype, device=device)
    left[0], left[1] = 2.0 * sign, -(2.0**-17) * sign
    right[:2, 0] = 1.0
    parts = [(left, right), (torch.zeros_like(left), right)]
    assert summed(parts)[:, 0].eq(2.0 * sign).all()


@pytest.mark.usefixtures("kernel")
def test_memory_past_the_end_of_a_row_does_not_count(device):
    """8 chunks in blocks of which 8 columns of 128 exist: their shared exponent is that of the 8."""
    parts = chunks_of(8, 16, 8, 136, torch.bfloat16, device)
    exact = sum(left.double().t() @ right.double() for left, right in parts)[:, 128:]
    gradient = summed(parts)[:, 128:].double()
    assert (gradient - exact).norm() <= 1.01 * (exact.bfloat16().double() - exact).norm()


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_stay_so(bad, device):
    parts = chunks_of(3, 16, 24, 16, torch.bfloat16, device)
    parts[0][0][3] = bad
    assert not summed(parts).isfinite().any()


@pytest.mark.usefixtures("kernel")
def test_views_that_are_not_aligned(device):
    parts = chunks_of(2, 16, 24, 16, torch.bfloat16, device)
    shifted = []
    for left, right in parts:
        storage = right.new_empty(right.numel() + 1)
        storage[1:] = right.flatten()
        shifted.append((left, storage[1:].view_as(right)))
    assert torch.equal(summed(shifted), summed(parts))


@pytest.mark.usefixtures("kernel")
def test_narrow_hidden_states_are_summed_without_the_kernel(device):
    total = WeightGradientSum(torch.empty(8, 12, dtype=torch.bfloat16, device=device), 2)
    assert total.launch is None


@pytest.mark.usefixtures("kernel")
def test_linear_cross_entropy_rounds_its_weight_gradient_once(device):
    torch.manual_seed(0)
    hidden = torch.randn(96, 32, device=device).bfloat16()
    weight = (torch.randn(70, 32, device=device) * 0.3).bfloat16().requires_grad_()
    target = torch.randint(70, (96,), device=device)

    def error(**options):
        (gradient,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, target, **options), weight)
        weight64 = weight.detach().double().requires_grad_()
        loss = torch.nn.functional.cross_entropy(hidden.double() @ weight64.t(), target)
        (exact,) = torch.autograd.grad(loss, weight64)
        return relative_error(gradient, exact)

    in_one, four_chunks = error(), 24 * 128 * 2
    with mock.patch.object(weight_gradient, "launch_for", return_value=None):
        in_bf16 = error(logits_memory=four_chunks)
    assert error(logits_memory=four_chunks) < 1.02 * in_one < in_bf16


@pytest.mark.usefixtures("kernel")
def test_linear_cross_entropy_in_panels_has_the_error_of_one_chunk(device):
    """The first 32 of 80 tokens in the memory of dW, which then goes on as block floating point."""
    torch.manual_seed(0)
    hidden = torch.randn(80, 32, device=device).bfloat16().requires_grad_()
    weight = (torch.randn(300, 32, device=device) * 0.5).bfloat16().requires_grad_()
    target = torch.randint(300, (80,), device=device)
    target[::7] = -100
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.autograd.grad(torch.nn.functional.cross_entropy(doubles[0] @ doubles[1].t(), target), doubles)

    def errors(plan, rows):
        with (
            mock.patch.object(operator, "plan_panels", return_value=plan),
            mock.patch.object(operator, "chunk_rows", return_value=rows),
        ):
            loss = linear_cross_entropy(hidden, weight, target)
            gradients = torch.autograd.grad(loss, (hidden, weight))
        return list(map(relative_error, gradients, exact))

    in_one = errors(None, 80)
    for ours, theirs in zip(errors(PanelPlan(32, 3, 128), 16), in_one):
        assert ours < 1.03 * theirs


# Real shapes, memory and waiting on a GPU.


def gpu_chunks_of(chunks, tokens, vocab_size, hidden_size, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    padded = -(-vocab_size // 8) * 8  # rows of the gradient start at multiples of 16 bytes

    def part():
        left = torch.randn(tokens, padded, generator=generator, device="cuda", dtype=dtype)
        right = torch.randn(tokens, hidden_size, generator=generator, device="cuda", dtype=dtype)
        return left[:, :vocab_size], right

    return [part() for _ in range(chunks)]


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point", "kernel")
def test_error_at_the_shape_of_llama_is_that_of_one_rounding():
    parts = gpu_chunks_of(3, 2048, 128256, 4096)
    gradient = summed(parts)
    rows = torch.arange(0, 128256, 499, device="cuda")
    exact = sum(left[:, rows].double().t() @ right.double() for left, right in parts)
    error, rounding = (gradient[rows] - exact).norm(), (exact.bfloat16() - exact).norm()
    assert error <= 1.01 * rounding


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3, 8), (64, 1001, 512), (200, 33000, 1288)], ids=str)
def test_kernels_give_the_same_bits_and_continue_each_others_sums(shape, dtype):
    """Their matmuls take the same steps of the same size in the same order, and what is stored has one format."""
    hopper = launch_for(torch.device("cuda", 0))
    if hopper is launch:
        pytest.skip("needs a Hopper GPU and the Gluon of a Triton that the kernel is written for")
    parts = gpu_chunks_of(4, *shape, dtype)
    plain = summed(parts, [launch])
    for kernels in ([hopper], [hopper, launch], [launch, hopper]):
        assert torch.equal(summed(parts, kernels), plain)


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point", "kernel")
def test_gpu_two_runs_are_equal():
    parts = gpu_chunks_of(3, 704, 20000, 1024)
    assert torch.equal(summed(parts), summed(parts))


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point", "kernel")
def test_cuda_graph_replays_on_new_inputs():
    parts = gpu_chunks_of(2, 200, 5000, 520)
    graph, result = captured(lambda: summed(parts))
    for _, right in parts:
        right.copy_(right.flip(1))
    graph.replay()
    assert torch.equal(result, summed(parts))


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point", "kernel")
def test_nothing_synchronises():
    parts = gpu_chunks_of(3, 200, 5000, 520)
    summed(parts)  # compiles
    with no_host_sync():
        summed(parts)


@pytest.mark.gpu
@pytest.mark.usefixtures("_block_floating_point", "kernel")
def test_peak_memory_is_the_gradient_and_its_exponents():
    parts = gpu_chunks_of(3, 256, 32000, 2048)
    assert peak_memory(lambda: summed(parts)) <= 32000 * 2048 * (2 + 1 / 128) + MIB
