"""relu_squared's kernels: values, gradients, layouts, registration."""

from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from liger_trainer.kernels.mlp import relu_squared as operators
from liger_trainer.kernels.mlp.relu_squared import relu_squared, relu_squared_reference
from tests.accuracy import in_float64, seeded_randn, value_and_gradients

randn = partial(seeded_randn, scale=3.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_worse_than_eager(dtype, device):
    x = randn(5, 700, dtype=dtype, device=device).requires_grad_()
    exact = in_float64(relu_squared_reference, x)
    eager = value_and_gradients(relu_squared_reference, x)
    for ours, theirs, right in zip(value_and_gradients(relu_squared, x), eager, exact):
        assert ours.dtype == dtype
        assert (ours - right).norm() <= 1.1 * (theirs - right).norm()


@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    columns=st.integers(1, 1100),
    transposed=st.booleans(),
    inplace=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_any_shape_and_layout(shape, columns, transposed, inplace):
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    x = randn(*shape, columns, device=device)
    x = (x.mT.contiguous().mT if transposed and x.dim() > 1 else x).requires_grad_()
    expected = value_and_gradients(relu_squared_reference, x)
    ours = value_and_gradients(lambda x: relu_squared(x, inplace_backward=inplace), x)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    assert ours[0].is_contiguous()


def test_nan_infinity_and_zero(device):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], device=device).requires_grad_()
    ours, expected = value_and_gradients(relu_squared, x), value_and_gradients(relu_squared_reference, x)
    torch.testing.assert_close(ours, expected, equal_nan=True)


def loss(x, inplace=False):
    return relu_squared(2 * x, inplace_backward=inplace).square().sum()


def test_inplace_backward(device):
    x = randn(3, 20, device=device).requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    kept = loss(x, True)
    assert torch.equal(torch.autograd.grad(kept, x, retain_graph=True)[0], expected)
    assert torch.equal(torch.autograd.grad(kept, x)[0], expected)
    with mock.patch.object(operators, "_relu_squared_backward", side_effect=AssertionError("allocates")):
        (dx,) = torch.autograd.grad(relu_squared(x, inplace_backward=True).sum(), x)
    assert dx.data_ptr() == x.data_ptr()
    with pytest.raises(ValueError, match="it is expanded"):
        relu_squared(x[:1].expand(3, 20), inplace_backward=True)


def test_second_derivative_is_refused(device):
    x = randn(3, 20, device=device).requires_grad_()
    (gradient,) = torch.autograd.grad(relu_squared(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="relu_squared cannot itself be differentiated"):
        gradient.sum().backward()


def test_opcheck(device):
    x, dy = randn(3, 7, device=device).requires_grad_(), randn(7, 3, seed=1, device=device).mT
    opcheck(operators._relu_squared, (x, False))
    opcheck(operators._relu_squared_backward, (dy, x.detach()))
    opcheck(operators._relu_squared_backward_, (dy, x.detach().clone()))


@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_fullgraph(inplace, device):
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device != "cpu" else "aot_eager")
    x = randn(3, 20, device=device).requires_grad_()
    ours, expected = (torch.autograd.grad(f(x, inplace), x) for f in (compiled, loss))
    torch.testing.assert_close(ours, expected)
