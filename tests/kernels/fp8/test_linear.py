"""A linear layer in each mode of fp8: its error, what stays in bf16, autocast, checkpoints, numbers not finite."""

from typing import get_args

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.kernels.fp8 import linear as operators
from liger_trainer.kernels.fp8.linear import fp8_linear, takes_fp8
from liger_trainer.kernels.fp8.modes import Fp8Mode
from liger_trainer.kernels.mlp.glu import geglu_down, geglu_down_reference, swiglu_down, swiglu_down_reference
from tests.accuracy import errors, run
from tests.accuracy import seeded_randn as randn

BF16 = {"dtype": torch.bfloat16}
MODES = get_args(Fp8Mode)


def inputs(device, *shape, outputs=48, features=64):
    x = randn(*shape, features, device=device, **BF16)
    return x, randn(outputs, features, seed=1, device=device, **BF16), randn(outputs, seed=3, device=device, **BF16)


def rounded(x, over=(0, 1), dtype=torch.float8_e4m3fn):
    """`x` in fp8 and back, with a scale for what remains after the dimensions `over`."""
    largest = x.float().abs().amax(over, keepdim=True)
    most = torch.full_like(largest, torch.finfo(dtype).max)
    return (x.float() * (most / largest)).to(dtype).double() * (largest / most).double()


def rounded_products(mode, x, weight, dy):
    """The three products of the operands of torchao's recipes, in float64."""
    if mode == "tensorwise":
        x, weight, dy = rounded(x), rounded(weight), rounded(dy, dtype=torch.float8_e5m2)
        return x @ weight.t(), dy @ weight, dy.t() @ x
    y = rounded(x, 1) @ rounded(weight, 1).t()
    if mode == "rowwise":
        return y, rounded(dy, 1) @ rounded(weight, 0), rounded(dy, 0).t() @ rounded(x, 0)
    return y, rounded(dy, 1) @ rounded(weight), dy.double().t() @ x.double()


@pytest.mark.kernel
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 37), (1,), (15,), (16,), (17,)])
def test_products_are_those_of_the_rounded_operands(shape, mode, device):
    x, weight, bias = inputs(device, *shape)
    (y, dx, dweight, dbias), (dy,) = run(fp8_linear, (x, weight, bias), mode=mode)
    rows, dy = x.reshape(-1, 64), dy.reshape(-1, 48)
    truth = rounded_products(mode, rows, weight, dy)
    truth = (truth[0] + bias.double(), *truth[1:], dy.double().sum(0))
    for error in errors([y.reshape(-1, 48), dx.reshape(-1, 64), dweight, dbias], truth):
        assert error < 2**-8  # of the result's rounding to bf16


# torchao's tests ask for 25 dB of a product with a scale for each row, an error of 0.056, and for 20 dB, 0.1, of the
# gradients of whole layers.
IN_E4M3, IN_E5M2, IN_BF16 = (0.03, 0.04), (0.05, 0.065), (0.0, 2**-8)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("rowwise", (IN_E4M3, IN_E4M3, IN_E4M3)),
        ("rowwise_gw_hp", (IN_E4M3, IN_E4M3, IN_BF16)),
        ("tensorwise", (IN_E4M3, IN_E5M2, IN_E5M2)),
    ],
)
def test_the_error_is_that_of_the_mantissa(mode, expected, device):
    x, weight, bias = inputs(device, 256, features=256, outputs=256)
    (*products, _), (dy,) = run(fp8_linear, (x, weight, bias), mode=mode)
    truth, _ = run(F.linear, (x.double(), weight.double(), bias.double()), [dy])
    for error, (least, most) in zip(errors(products, truth[:3]), expected, strict=True):
        assert least < error < most


@pytest.mark.parametrize("mode", MODES)
def test_tokens_with_small_gradients_are_not_lost(mode, device):
    x, weight, _ = inputs(device, 32, outputs=256)
    dy = randn(32, 256, seed=2, device=device, **BF16) * torch.logspace(0, -14, 32, 2, device=device, **BF16)[:, None]
    x.requires_grad_()
    fp8_linear(x, weight, mode=mode).backward(dy)
    truth = dy.double() @ weight.double()
    assert ((x.grad - truth).norm(dim=1) < 0.4 * truth.norm(dim=1)).all()


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (torch.zeros(4, 64), torch.zeros(32, 64)),
        (torch.zeros(4, 64, dtype=torch.float64), torch.zeros(32, 64, dtype=torch.float64)),
        (torch.zeros(4, 64, dtype=torch.float16), torch.zeros(32, 64, dtype=torch.float16)),
        (torch.zeros(0, 64, **BF16), torch.zeros(32, 64, **BF16)),
        (torch.zeros(4, 40, **BF16), torch.zeros(32, 40, **BF16)),
        (torch.zeros(4, 64, **BF16), torch.zeros(31, 64, **BF16)),
    ],
    ids=["fp32", "fp64", "fp16", "empty", "features", "outputs"],
)
def test_everything_else_is_a_linear_layer(x, weight):
    assert not takes_fp8(x, weight)
    y, expected = fp8_linear(x, weight), F.linear(x, weight)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)


def test_a_card_without_fp8_computes_a_linear_layer(monkeypatch):
    monkeypatch.setattr(operators, "has_fp8", lambda device: False)
    x, weight, bias = inputs("cpu", 6)
    assert torch.equal(fp8_linear(x, weight, bias), F.linear(x, weight, bias))


def test_autocast_casts_as_for_a_linear_layer(device):
    x, weight, bias = (tensor.float().requires_grad_() for tensor in inputs(device, 6))
    with torch.autocast(device, torch.bfloat16):
        y = fp8_linear(x, weight, bias)
    torch.testing.assert_close(y, fp8_linear(x.bfloat16(), weight.bfloat16(), bias.bfloat16()))
    y.sum().backward()
    with torch.autocast(device, torch.bfloat16):
        assert not takes_fp8(x.double(), weight.double())
    assert [x.grad.dtype, weight.grad.dtype, bias.grad.dtype] == [torch.float32] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_not_hidden(value, mode, device):
    """It stays in its row where rows have scales of their own."""
    x, weight, _ = (tensor.requires_grad_() for tensor in inputs(device, 4))
    with torch.no_grad():
        x[2, 5] = value
    y = fp8_linear(x, weight, mode=mode)
    assert not y[2].isfinite().any()
    y.backward(torch.ones_like(y))
    assert not weight.grad[:, 5].isfinite().any()
    assert y.isfinite().any() == (mode != "tensorwise")
    if mode == "rowwise":
        assert weight.grad.isfinite().sum() == 48 * 63
    dy = randn(4, 48, device=device, **BF16)
    dy[1, 3] = value
    x, weight = x.detach().nan_to_num(posinf=0).requires_grad_(), weight.detach().requires_grad_()
    fp8_linear(x, weight, mode=mode).backward(dy)
    assert not x.grad[1].isfinite().any()
    assert not weight.grad[3].isfinite().any()
    assert x.grad.isfinite().any() == (mode != "tensorwise")


@pytest.mark.kernel
def test_gradients_that_share_memory_or_are_transposed(device):
    """As the gradient of a sum, whose strides are 0."""
    x, weight, _ = inputs(device, 6)
    shared, turned = torch.ones((), device=device, **BF16).expand(6, 48), randn(48, 6, device=device, **BF16).t()
    for mode in MODES:
        for dy in (shared, turned):
            largest, same = operators.largest_of_gradient(dy, mode), dy.contiguous()
            for gradient, other in ((operators.input_gradient, weight), (operators.weight_gradient, x)):
                assert torch.equal(gradient(dy, other, mode, largest), gradient(same, other, mode, largest))
    wide = torch.cat([x, x]).t().contiguous().t()  # columns apart
    assert torch.equal(fp8_linear(wide, weight), fp8_linear(wide.contiguous(), weight))


def test_frozen_operands_get_no_gradient(device):
    x, weight, bias = inputs(device, 6)
    fp8_linear(x.requires_grad_(), weight, bias).sum().backward()
    assert x.grad is not None
    fp8_linear(x.detach(), weight.requires_grad_(), bias).sum().backward()
    assert weight.grad is not None


@pytest.mark.kernel
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("function", "reference"), [(swiglu_down, swiglu_down_reference), (geglu_down, geglu_down_reference)]
)
def test_a_down_projection_in_fp8(function, reference, mode, device):
    gate, up = (randn(6, 64, seed=seed, device=device, **BF16) for seed in (4, 5))
    _, weight, bias = inputs(device, 1)
    ours, upstream = run(function, (gate, up, weight, bias), fp8=mode)
    expected, _ = run(reference, (gate, up, weight, bias), upstream, fp8=mode)
    wide, _ = run(reference, [tensor.double() for tensor in (gate, up, weight, bias)], upstream)
    for error, usual in zip(errors(ours, expected), (0.01, 0.01, 0.01, 0.005, 0.001)):
        assert error <= usual
    exact = [error < 0.01 for error in errors(ours, wide)]  # which of them are in bf16
    assert exact == [False, False, False, mode == "rowwise_gw_hp", True]


def test_another_mode_is_refused():
    x, weight, _ = inputs("cpu", 4)
    with pytest.raises(ValueError, match="fp8 is 'e5m2'; it must be 'rowwise', 'rowwise_gw_hp', 'tensorwise'"):
        fp8_linear(x, weight, mode="e5m2")
