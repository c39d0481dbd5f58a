"""Linear layers of one input: values and gradients of separate layers, with one rounding of the input's gradient."""

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.kernels.linears import linears

WIDTHS = (12, 5, 3)


def _operands(dtype=torch.float64, biased=True):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(2, 7, 8), [(draw(width, 8), draw(width) if biased and width != 5 else None) for width in WIDTHS]


def _flat(layers):
    return [each for layer in layers for each in layer if each is not None]


def _gradients(compute, x, layers, used=WIDTHS, **options):
    results = compute(x, layers)
    loss = sum(y.float().sin().sum() for y, width in zip(results, WIDTHS) if width in used)
    return results, torch.autograd.grad(loss, [x, *_flat(layers)], allow_unused=True, **options)


def _apart(x, layers):
    return tuple(F.linear(x, *layer) for layer in layers)


def test_values_and_gradients_are_those_of_separate_layers():
    x, layers = _operands()
    for (y, gradients), (expected, theirs) in [(_gradients(linears, x, layers), _gradients(_apart, x, layers))]:
        torch.testing.assert_close(y, expected, rtol=0, atol=0)
        torch.testing.assert_close(gradients, theirs)


@pytest.mark.parametrize("used", [(12,), (5,), (3,), (12, 3)])
def test_results_that_nothing_reads_have_no_gradient(used):
    x, layers = _operands()
    _, gradients = _gradients(linears, x, layers, used)
    _, theirs = _gradients(_apart, x, layers, used)
    assert [each is None for each in gradients] == [each is None for each in theirs]
    torch.testing.assert_close(gradients, theirs)


def test_second_derivatives():
    x, layers = _operands()
    flat = [x, *_flat(layers)]

    def compute(x, w0, b0, w1, w2, b2):
        return linears(x, [(w0, b0), (w1, None), (w2, b2)])

    assert torch.autograd.gradcheck(compute, flat)
    assert torch.autograd.gradgradcheck(compute, flat)


def test_a_second_backward_over_the_same_graph_finds_the_same():
    x, layers = _operands()
    loss = sum(y.sin().sum() for y in linears(x, layers))
    first, second = (torch.autograd.grad(loss, [x, *_flat(layers)], retain_graph=True) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_the_gradient_of_the_input_is_rounded_less_often():
    x, layers = _operands(torch.bfloat16)
    exact, exact_layers = (
        x.detach().double().requires_grad_(),
        [tuple(None if each is None else each.detach().double() for each in layer) for layer in layers],
    )
    truth = torch.autograd.grad(sum(y.sum() for y in _apart(exact, exact_layers)), exact)[0]
    ours, theirs = (
        torch.autograd.grad(sum(y.sum() for y in compute(x, layers)), x)[0].double() for compute in (linears, _apart)
    )
    assert (ours - truth).norm() <= (theirs - truth).norm()


def test_frozen_weights_and_a_frozen_input():
    x, layers = _operands()
    frozen = [tuple(None if each is None else each.detach() for each in layer) for layer in layers]
    torch.testing.assert_close(
        torch.autograd.grad(sum(y.sin().sum() for y in linears(x, frozen)), x),
        torch.autograd.grad(sum(y.sin().sum() for y in _apart(x, frozen)), x),
    )
    results, expected = linears(x.detach(), layers), _apart(x.detach(), layers)
    for one, other in zip(
        torch.autograd.grad(sum(y.sin().sum() for y in results), _flat(layers)),
        torch.autograd.grad(sum(y.sin().sum() for y in expected), _flat(layers)),
    ):
        torch.testing.assert_close(one, other)


def test_autocast_gives_what_it_gives_separate_layers():
    x, layers = _operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (y, gradients), (expected, theirs) = _gradients(linears, x, layers), _gradients(_apart, x, layers)
    assert [each.dtype for each in y] == [each.dtype for each in expected]
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    for one, other in zip(gradients, theirs):
        assert one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
