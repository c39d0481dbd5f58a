"""A linear layer in fp8: its error, what stays in bf16, autocast, checkpoints, and rows that are not finite."""

import pytest
import torch
from torch.library import opcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.fp8 import linear as operators
from liger_trainer.kernels.fp8 import shared_cast
from liger_trainer.kernels.fp8.linear import fp8_linear, takes_fp8
from liger_trainer.kernels.fp8.row_cast import cast_rows_reference, cast_transposed_reference
from liger_trainer.kernels.mlp.gated_down import geglu_down, geglu_down_reference, swiglu_down, swiglu_down_reference
from tests.accuracy import errors, run
from tests.accuracy import seeded_randn as randn
from tests.calls import recorded_calls

BF16 = {"dtype": torch.bfloat16}


def inputs(device, *shape, outputs=48, features=64):
    x = randn(*shape, features, device=device, **BF16)
    return x, randn(outputs, features, seed=1, device=device, **BF16), randn(outputs, seed=3, device=device, **BF16)


def rounded_rows(x):
    codes, scales = cast_rows_reference(x)
    return codes.double() * scales.double()


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(2, 37), (1,), (5,)])
def test_products_are_those_of_the_rounded_operands(shape, device):
    x, weight, bias = inputs(device, *shape)
    (y, dx, dweight, dbias), (dy,) = run(fp8_linear, (x, weight, bias))
    rows, dy = x.reshape(-1, 64), dy.reshape(-1, 48)
    codes, scale = cast_transposed_reference(weight)
    truth = (
        rounded_rows(rows) @ rounded_rows(weight).t() + bias.double(),
        rounded_rows(dy) @ (codes.double() * scale.double()).t(),
        dy.double().t() @ rows.double(),
        dy.double().sum(0),
    )
    for error in errors([y.reshape(-1, 48), dx.reshape(-1, 64), dweight, dbias], truth):
        assert error < 2**-8  # of the result's rounding to bf16


def test_the_error_is_that_of_three_bits(device):
    x, weight, bias = inputs(device, 64, features=1024, outputs=256)
    (y, dx, dweight, _), (dy,) = run(fp8_linear, (x, weight, bias))
    truth, _ = run(F.linear, (x.double(), weight.double(), bias.double()), [dy])
    output, input_, of_weight = errors([y, dx, dweight], truth[:3])
    assert 0.03 < output < 0.04
    assert 0.03 < input_ < 0.04
    assert of_weight < 2**-8


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


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(value, device):
    x, weight, _ = inputs(device, 4)
    x[2, 5] = value
    finite = fp8_linear(x, weight).isfinite()
    assert finite.all(1).tolist() == [True, True, False, True]
    assert not finite[2].any()


@pytest.mark.kernel
def test_gradients_that_share_memory_or_are_transposed(device):
    """As the gradient of a sum, whose strides are 0."""
    x, weight, _ = inputs(device, 6)
    shared, turned = torch.ones((), device=device, **BF16).expand(6, 48), randn(48, 6, device=device, **BF16).t()
    for dy in (shared, turned):
        expected = operators.input_gradient(dy.contiguous(), weight)
        assert torch.equal(operators.input_gradient(dy, weight), expected)
    wide = torch.cat([x, x]).t().contiguous().t()  # columns apart
    assert torch.equal(fp8_linear(wide, weight), fp8_linear(wide.contiguous(), weight))


def test_frozen_operands_get_no_gradient(device):
    x, weight, bias = inputs(device, 6)
    fp8_linear(x.requires_grad_(), weight, bias).sum().backward()
    assert x.grad is not None
    fp8_linear(x.detach(), weight.requires_grad_(), bias).sum().backward()
    assert weight.grad is not None


def test_a_checkpoint_repeats_no_last_product(device, monkeypatch):
    x, weight, bias = (tensor.requires_grad_() for tensor in inputs(device, 6))
    of_input = recorded_calls(monkeypatch, shared_cast, "cast_rows")
    calls = recorded_calls(monkeypatch, operators, "cast_rows")
    checkpoint(fp8_linear, x, weight, bias, use_reentrant=False).sum().backward()
    assert [len(of_input), len(calls)] == [1, 2]  # the weight in the forward, dy in the backward


def test_opcheck(device):
    x, weight, bias = (tensor.requires_grad_() for tensor in inputs(device, 6))
    opcheck(operators.fp8_linear_save, (x, weight, bias))
    placeholder = randn(6, 48, device=device, **BF16).requires_grad_()
    opcheck(operators.fp8_linear_product, (placeholder, x.detach(), weight.detach(), bias.detach(), True))
    opcheck(operators.input_gradient, (placeholder.detach(), weight.detach()))


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("function", "reference"), [(swiglu_down, swiglu_down_reference), (geglu_down, geglu_down_reference)]
)
def test_a_down_projection_in_fp8(function, reference, device):
    gate, up = (randn(6, 64, seed=seed, device=device, **BF16) for seed in (4, 5))
    _, weight, bias = inputs(device, 1)
    ours, upstream = run(function, (gate, up, weight, bias), fp8=True)
    expected, _ = run(reference, (gate, up, weight, bias), upstream, fp8=True)
    wide, _ = run(reference, [tensor.double() for tensor in (gate, up, weight, bias)], upstream)
    for error, usual in zip(errors(ours, expected), (0.01, 0.01, 0.01, 0.005, 0.001)):
        assert error <= usual
    assert errors(ours, wide)[0] > 0.02  # it is not in bf16
