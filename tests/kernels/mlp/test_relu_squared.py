"""relu_squared: its reference against transformers, its kernels, and large shapes on a GPU."""

from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN

from liger_trainer.kernels.mlp import relu_squared as operators
from liger_trainer.kernels.mlp.relu_squared import relu_squared, relu_squared_reference
from tests.accuracy import assert_no_worse, in_float64, result_and_gradients, seeded_randn, value_and_gradients
from tests.aot import TARGETS, compile_launch, recorded_launches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_is_the_models_own(dtype):
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(relu_squared_reference(x), ACT2FN["relu2"](x))


def test_float64_runs_as_reference(device):
    x = torch.randn(3, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(relu_squared, x)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_ahead_of_time(target, dtype):
    x = torch.zeros(4, 1000, dtype=dtype)
    with recorded_launches() as launches:
        operators._relu_squared(x, False)
        operators._relu_squared_backward(x, x)
    assert len(launches) == 2
    for launch, tensors in zip(launches, (2, 3)):
        compiled = compile_launch(launch, target)
        if target == "sm_90":
            assert compiled.asm["ptx"].count(".v4.b32") == tensors


randn = partial(seeded_randn, scale=3.0)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_worse_than_eager(dtype, device):
    x = randn(5, 700, dtype=dtype, device=device).requires_grad_()
    exact = in_float64(relu_squared_reference, x)
    eager = value_and_gradients(relu_squared_reference, x)
    assert_no_worse(value_and_gradients(relu_squared, x), eager, exact)


@pytest.mark.kernel
@given(
    shape=st.lists(st.integers(0, 9), max_size=3),
    columns=st.integers(1, 1100),
    transposed=st.booleans(),
    inplace=st.booleans(),
)
@settings(max_examples=15)
def test_any_shape_and_layout(shape, columns, transposed, inplace):
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    x = randn(*shape, columns, device=device)
    x = (x.mT.contiguous().mT if transposed and x.dim() > 1 else x).requires_grad_()
    expected = value_and_gradients(relu_squared_reference, x)
    ours = value_and_gradients(lambda x: relu_squared(x, inplace_backward=inplace), x)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)
    assert ours[0].is_contiguous()


@pytest.mark.kernel
def test_nan_infinity_and_zero(device):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0], device=device).requires_grad_()
    ours, expected = value_and_gradients(relu_squared, x), value_and_gradients(relu_squared_reference, x)
    torch.testing.assert_close(ours, expected, equal_nan=True)


def loss(x, inplace=False):
    return relu_squared(2 * x, inplace_backward=inplace).square().sum()


@pytest.mark.kernel
def test_inplace_backward(device):
    x = randn(3, 20, device=device).requires_grad_()
    (expected,) = torch.autograd.grad(loss(x), x)
    retained = loss(x, True)
    assert torch.equal(torch.autograd.grad(retained, x, retain_graph=True)[0], expected)
    assert torch.equal(torch.autograd.grad(retained, x)[0], expected)
    with mock.patch.object(operators, "_relu_squared_backward", side_effect=AssertionError("allocates")):
        (dx,) = torch.autograd.grad(relu_squared(x, inplace_backward=True).sum(), x)
    assert dx.data_ptr() == x.data_ptr()
    with pytest.raises(ValueError, match="it is expanded"):
        relu_squared(x[:1].expand(3, 20), inplace_backward=True)


@pytest.mark.kernel
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_fullgraph(inplace, device):
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="inductor" if device != "cpu" else "aot_eager")
    x = randn(3, 20, device=device).requires_grad_()
    ours, expected = (torch.autograd.grad(f(x, inplace), x) for f in (compiled, loss))
    torch.testing.assert_close(ours, expected)


def real_randn(*shape, device="cuda", dtype=torch.bfloat16, scale=2.0):
    return scale * torch.randn(shape, device=device, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(8192, 2880), (70_001, 33)])
def test_large_inputs_round_no_worse(dtype, shape, device):
    torch.manual_seed(0)
    x, dy = real_randn(shape[0], shape[1], dtype=dtype, scale=4.0), real_randn(*shape, dtype=dtype)
    eager, exact = (
        result_and_gradients(relu_squared_reference, dy, x),
        result_and_gradients(relu_squared_reference, dy.double(), x.double()),
    )
    slack = 1.1 if dtype != torch.float32 else 6  # fast exp and division
    assert_no_worse(result_and_gradients(relu_squared, dy, x), eager, exact, slack)


@pytest.mark.gpu
def test_more_than_2_to_31_elements(device):
    x, dy = real_randn(2**16 + 1, 2**15 + 8), real_randn(2**16 + 1, 2**15 + 8)
    ours = result_and_gradients(relu_squared, dy, x)
    eager, exact = (
        result_and_gradients(relu_squared_reference, dy[-64:], x[-64:]),
        result_and_gradients(relu_squared_reference, dy[-64:].double(), x[-64:].double()),
    )
    for mine, theirs, right in zip(ours, eager, exact):
        assert (mine[-64:] - right).norm() <= 1.1 * (theirs - right).norm()
