"""The block floating point sum of a head's weight gradient, under the interpreter or on a GPU."""

from unittest import mock

import pytest
import torch

from liger_trainer.kernels.head import linear_cross_entropy as _linear_cross_entropy_chunks
from liger_trainer.kernels.head import weight_gradient
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.logits_in_weight_gradient import PanelPlan
from liger_trainer.kernels.head.weight_gradient import WeightGradientSum, hopper_launch, launch, launch_for
from liger_trainer.kernels.runtime import INTERPRETED

if not INTERPRETED and launch_for(torch.device("cuda", 0)) is None:
    pytest.skip("needs a GPU with a bulk copy engine (Hopper or later)", allow_module_level=True)

KERNELS = {"plain": launch}
if not INTERPRETED and launch_for(torch.device("cuda", 0)) is hopper_launch():
    KERNELS["hopper"] = hopper_launch()

SHAPES = [(70, 130, 264), (16, 8, 8), (1, 3, 520)]
if not INTERPRETED:  # steps of 64 tokens and the remainder, and many tiles for every multiprocessor
    SHAPES += [(64, 1001, 512), (65, 200, 1288), (192, 1000, 640), (200, 33000, 1288)]


@pytest.fixture(params=KERNELS, autouse=True)
def kernel(request):
    with mock.patch.object(weight_gradient, "launch_for", return_value=KERNELS[request.param]):
        yield


dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


def chunks_of(chunks, tokens, vocab_size, hidden_size, dtype, device):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    # Rows of very different size, as those of frequent and rare words are.
    rows = torch.exp2(torch.linspace(-8, 4, vocab_size)).to(dtype).to(device)
    return [(randn(tokens, vocab_size) * rows, randn(tokens, hidden_size)) for _ in range(chunks)]


def summed(parts, dtype, device):
    (_, vocab_size), (_, hidden_size) = parts[0][0].shape, parts[0][1].shape
    total = WeightGradientSum(
        torch.full((vocab_size, hidden_size), float("nan"), dtype=dtype, device=device), len(parts)
    )
    assert total.launch is not None
    for left, right in parts:
        total.add(left, right)
    total.finish()
    return total.weight_gradient


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_error_is_that_of_one_rounding(dtype, shape, device):
    parts = chunks_of(4, *shape, dtype, device)
    # Rows of the gradient start at multiples of 16 bytes, as in the head's padded buffer.
    parts = [(torch.nn.functional.pad(left, (0, -left.shape[1] % 8))[:, : left.shape[1]], x) for left, x in parts]
    exact = sum(left.double().t() @ right.double() for left, right in parts)
    gradient = summed(parts, dtype, device).double()
    # In every row by itself, however small it is beside the others.
    error, rounded = (gradient - exact).norm(dim=1), (exact.to(dtype).double() - exact).norm(dim=1)
    # The sum keeps 15 bits below the largest of a block: 7 more than bf16, 4 more than fp16.
    assert error.sum() <= (1.01 if dtype == torch.bfloat16 else 1.05) * rounded.sum()
    assert (error <= 1.1 * rounded + 1e-4 * exact.norm(dim=1)).all()


@dtypes
@pytest.mark.parametrize("vocab_size", [36, 40])
def test_a_head_that_lies_transposed_in_memory(dtype, vocab_size, device):
    """Its gradient does too, which the copy engine cannot write; the sum then goes the way of other devices."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(40, 16, generator=generator).to(dtype).to(device)
    stored = torch.randn(16, vocab_size, generator=generator).to(dtype).to(device).requires_grad_()
    labels = torch.randint(0, vocab_size, (40,), generator=generator).to(device)

    def gradient(weight):
        loss = linear_cross_entropy(hidden, weight, labels, logits_memory=16 * 64 * 2)
        return torch.autograd.grad(loss, stored)[0].double()

    ours, expected = gradient(stored.t()), gradient(stored.t().contiguous())
    assert (ours - expected).norm() <= 0.01 * expected.norm()  # it rounds after each of the three chunks


@dtypes
@pytest.mark.parametrize("chunks", [2, 3])
def test_a_first_chunk_in_panels_gives_the_same_bits(chunks, dtype, device):
    """Panels write only their own rows of dW and of the exponents; the logits' gradient may lie in the rows after."""
    parts = chunks_of(chunks, 16, 136, 264, dtype, device)
    whole = summed(parts, dtype, device)
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
    total.finish()
    assert torch.equal(total.weight_gradient, whole)


@dtypes
def test_two_runs_are_equal(dtype, device):
    parts = chunks_of(3, 64, 40, 24, dtype, device)
    assert torch.equal(summed(parts, dtype, device), summed(parts, dtype, device))


def test_large_small_and_zero_rows(device):
    left = torch.zeros(16, 24)
    left[0] = torch.tensor([0.0, 1e-38, 1e-30, 1e-20, 1.0, 1e20, 1e30, 3e38] * 3)
    right = torch.ones(16, 8)
    parts = [
        (left.bfloat16().to(device), right.bfloat16().to(device)),
        (torch.zeros_like(left).bfloat16().to(device),) * 2,
    ]
    parts[1] = (parts[1][0], right.bfloat16().to(device))
    gradient = summed(parts, torch.bfloat16, device)
    expected = left[0].bfloat16().to(device)[:, None].expand(-1, 8)
    # The smallest unit of a block is the smallest normal number: below it there is nothing to keep.
    torch.testing.assert_close(gradient, expected, rtol=0, atol=2.0**-126)


@dtypes
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_rounding_that_carries_into_the_next_power(sign, dtype, device):
    """2 - 2**-17 is 32768 units less an eighth: as the integer that it rounds to it would wrap around to -2."""
    left, right = torch.zeros(16, 8, dtype=dtype, device=device), torch.zeros(16, 8, dtype=dtype, device=device)
    left[0], left[1] = 2.0 * sign, -(2.0**-17) * sign
    right[:2, 0] = 1.0
    parts = [(left, right), (torch.zeros_like(left), right)]
    assert summed(parts, dtype, device)[:, 0].eq(2.0 * sign).all()


def test_what_lies_past_the_end_of_a_row_does_not_count(device):
    """8 chunks in blocks of which 8 columns of 128 exist: their shared exponent is that of the 8."""
    parts = chunks_of(8, 16, 8, 136, torch.bfloat16, device)
    exact = sum(left.double().t() @ right.double() for left, right in parts)[:, 128:]
    gradient = summed(parts, torch.bfloat16, device)[:, 128:].double()
    assert (gradient - exact).norm() <= 1.01 * (exact.bfloat16().double() - exact).norm()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(bad, device):
    parts = chunks_of(3, 16, 24, 16, torch.bfloat16, device)
    parts[0][0][3] = bad
    assert not summed(parts, torch.bfloat16, device).isfinite().any()


def test_views_that_are_not_aligned(device):
    parts = chunks_of(2, 16, 24, 16, torch.bfloat16, device)
    shifted = []
    for left, right in parts:
        storage = right.new_empty(right.numel() + 1)
        storage[1:] = right.flatten()
        shifted.append((left, storage[1:].view_as(right)))
    assert torch.equal(summed(shifted, torch.bfloat16, device), summed(parts, torch.bfloat16, device))


def test_narrow_hidden_states_take_the_other_way(device):
    total = WeightGradientSum(torch.empty(8, 12, dtype=torch.bfloat16, device=device), 2)
    assert total.launch is None


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
        return ((gradient.double() - exact).norm() / exact.norm()).item()

    in_one, four_chunks = error(), 24 * 128 * 2
    with mock.patch.object(weight_gradient, "launch_for", return_value=None):
        in_bf16 = error(logits_memory=four_chunks)
    assert error(logits_memory=four_chunks) < 1.02 * in_one < in_bf16


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
            mock.patch.object(_linear_cross_entropy_chunks, "plan_panels", return_value=plan),
            mock.patch.object(_linear_cross_entropy_chunks, "chunk_rows", return_value=rows),
        ):
            loss = linear_cross_entropy(hidden, weight, target)
            gradients = torch.autograd.grad(loss, (hidden, weight))
        return [((mine.double() - truth).norm() / truth.norm()).item() for mine, truth in zip(gradients, exact)]

    in_one = errors(None, 80)
    for ours, theirs in zip(errors(PanelPlan(32, 3, 128), 16), in_one):
        assert ours < 1.03 * theirs
