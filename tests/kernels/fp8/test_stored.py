"""A weight stored in fp8: its products against float64, rows of any number, adapters on it, and what is not saved."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.fp8 import row_cast, stored
from liger_trainer.kernels.fp8.row_cast import E4M3_MAX, cast_rows_reference
from liger_trainer.kernels.fp8.stored import (
    Fp8Weight,
    dequantize,
    fp8_stored_linear,
    fp8_stored_linear_reference,
    store,
    transposed_codes,
)
from liger_trainer.kernels.lora.lora import LoRA, LoRALayer, lora_linear, lora_linears, lora_linears_reference
from liger_trainer.kernels.lora.lora_mlp import lora_mlp, lora_mlp_reference
from tests.accuracy import errors, result_and_gradients, run
from tests.accuracy import seeded_randn as randn
from tests.aot import compile_launch, recorded_launches
from tests.calls import recorded_calls, saved_tensors

BF16 = {"dtype": torch.bfloat16}


def weight_of(device, outputs=48, features=64, seed=1):
    """Rows whose magnitudes differ by 2^10."""
    magnitudes = torch.logspace(-9, 1, outputs, 2.0, device=device)[:, None]
    return store((randn(outputs, features, seed=seed, device=device) * magnitudes).bfloat16())


def on_stored(weight):
    return lambda x, bias: fp8_stored_linear(x, weight, bias)


def rounded_rows(x):
    codes, scales = cast_rows_reference(x)
    return codes.double() * scales.double()


def test_a_stored_weight_takes_a_byte_an_element_and_is_near():
    numbers = randn(48, 64, **BF16)
    weight = store(numbers)
    assert (weight.codes.dtype, weight.codes.shape) == (torch.uint8, (48, 64))
    assert (weight.scales.dtype, weight.scales.shape) == (torch.float32, (48, 1))
    assert 0.02 < errors([dequantize(weight, torch.float32)], [numbers])[0] < 0.03
    again = store(dequantize(weight, torch.float32))
    torch.testing.assert_close(dequantize(again, torch.float32), dequantize(weight, torch.float32))


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(2, 37), (1,), (5,)])
def test_products_are_those_of_the_rounded_operands(shape, device):
    weight, bias = weight_of(device), randn(48, seed=3, device=device, **BF16)
    x = randn(*shape, 64, device=device, **BF16)
    (y, dx, dbias), (dy,) = run(on_stored(weight), (x, bias))
    exact, factors = dequantize(weight, torch.float64), weight.scales.t() * E4M3_MAX
    rows, upstream = x.reshape(-1, 64), dy.reshape(-1, 48)
    of_rows = rounded_rows(upstream.float() * factors) @ (exact / factors.t().double())
    truth = rounded_rows(rows) @ exact.t() + bias.double(), of_rows, upstream.double().sum(0)
    for error in errors([y.reshape(-1, 48), dx.reshape(-1, 64), dbias], truth):
        assert error < 2**-8  # of the result's rounding to bf16
    assert errors([dx.reshape(-1, 64)], [upstream.double() @ exact])[0] < 0.16  # of the stored weight
    assert errors([y.reshape(-1, 48)], [rows.double() @ exact.t() + bias.double()])[0] < 0.16


def test_gradients_far_below_one_are_as_exact(device):
    weight, x = weight_of(device), randn(9, 64, device=device, **BF16)
    small, usual = (
        result_and_gradients(lambda x: fp8_stored_linear(x, weight), dy, x)[1]
        for dy in (randn(9, 48, device=device, **BF16) * scale for scale in (2.0**-30, 1.0))
    )
    assert torch.equal(small * 2.0**30, usual)


@pytest.mark.kernel
@pytest.mark.parametrize("shape", [(70, 100), (128, 128), (1, 3)])
def test_the_transpose_is_that_of_torch(shape, device):
    codes = torch.randint(256, shape, dtype=torch.uint8, device=device)
    turned = transposed_codes(Fp8Weight(codes, torch.ones(shape[0], 1, device=device)))
    assert turned.is_contiguous()
    assert torch.equal(turned, codes.t())


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_no_rows(shape, device):
    weight = weight_of(device)
    (y, dx, dbias), _ = run(on_stored(weight), (torch.zeros(*shape, 64, device=device), torch.zeros(48, device=device)))
    assert (y.shape, dx.shape) == ((*shape, 48), (*shape, 64))
    assert not dbias.any()
    x, lora = (
        torch.zeros(*shape, 64, device=device),
        LoRA(torch.ones(4, 64, device=device), torch.ones(48, 4, device=device)),
    )
    assert lora_linears(x, [LoRALayer(weight, None, (lora,))])[0].shape == (*shape, 48)


def test_the_dtype_is_that_of_the_input_or_autocast(device):
    weight, x = weight_of(device), randn(6, 64, device=device)
    expected = fp8_stored_linear(x.bfloat16(), weight)
    for dtype in (torch.float32, torch.float16, torch.float64):
        y = fp8_stored_linear(x.bfloat16().to(dtype), weight)
        assert y.dtype == dtype
        torch.testing.assert_close(y, expected.to(dtype))
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(fp8_stored_linear(x, weight), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_row(value, device):
    x = randn(4, 64, device=device, **BF16)
    dy = randn(4, 48, device=device, **BF16)
    dy[1, 3] = x[2, 5] = value
    y, dx = result_and_gradients(lambda x: fp8_stored_linear(x, weight_of(device)), dy, x)
    assert y.isfinite().all(1).tolist() == [True, True, False, True]
    assert dx.isfinite().all(1).tolist() == [True, False, True, True]
    numbers = randn(48, 64, device=device, **BF16)
    numbers[7, 0] = value
    y, dx = result_and_gradients(lambda x: fp8_stored_linear(x, store(numbers)), dy[2:], x[3:].expand(2, 64))
    assert y.isfinite().all(0).nonzero().flatten().tolist() == [index for index in range(48) if index != 7]
    assert not dx.isfinite().any()


def test_nothing_is_saved_or_computed_again(device, monkeypatch):
    weight = weight_of(device)
    x = randn(6, 64, device=device, **BF16).requires_grad_()
    with saved_tensors() as saved:
        fp8_stored_linear(x, weight)
    assert saved == []
    calls = recorded_calls(monkeypatch, stored, "cast_rows")
    checkpoint(fp8_stored_linear, x, weight, use_reentrant=False).sum().backward()
    assert len(calls) == 1
    assert x.grad.isfinite().all()


def test_second_derivatives(device):
    weight, x = weight_of(device), randn(6, 64, device=device, **BF16).requires_grad_()
    (dx,) = torch.autograd.grad(fp8_stored_linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of fp8_stored_linear cannot itself be differentiated"):
        dx.sum().backward()
    wide = x.detach().double().requires_grad_()
    torch.testing.assert_close(fp8_stored_linear_reference(wide, weight), wide @ dequantize(weight, wide.dtype).t())


def adapted(device, masked=False):
    """An input and the factors of three adapters; and the layers, one without an adapter, of one weight in bf16."""
    x = randn(11, 64, device=device, **BF16)
    weights = weight_of(device), weight_of(device, outputs=32, seed=4), randn(16, 64, device=device, **BF16)
    mask = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(device) < 0.7 if masked else None
    factors = [randn(*shape, seed=5 + i, device=device, scale=0.2) for i, shape in enumerate([(4, 64), (48, 4)] * 2)]

    def layers(a0, b0, a1, b1):
        two = LoRALayer(weights[0], None, (LoRA(a0, b0, 1.5, mask), LoRA(a1, b1)))
        return [
            two,
            LoRALayer(weights[1]),
            LoRALayer(weights[2].to(a0.dtype if a0.dtype == torch.float64 else x.dtype)),
        ]

    return (x, *factors), layers


@pytest.mark.kernel
@pytest.mark.parametrize("masked", [False, True])
def test_adapters_on_a_stored_base(masked, device):
    tensors, layers = adapted(device, masked)
    ours, upstream = run(lambda x, *factors: lora_linears(x, layers(*factors)), tensors)
    wide = [tensor.double() for tensor in tensors]
    truth, _ = run(lambda x, *factors: lora_linears_reference(x, layers(*factors)), wide, upstream)
    *products, da0, db0, da1, db1 = errors(ours, truth)
    assert all(error < 0.04 for error in products)
    assert all(error < 2**-7 for error in (da0, db0, da1, db1))  # no product of theirs is in fp8


def test_layers_of_one_input_cast_it_once(device, monkeypatch):
    (x, *factors), layers = adapted(device)
    calls = recorded_calls(monkeypatch, stored, "cast_rows")
    lora_linears(x, layers(*factors))
    assert len(calls) == 1


@pytest.mark.kernel
def test_a_gated_mlp_on_a_stored_base(device):
    shapes = [(4, 64), (48, 4), (4, 64), (48, 4), (4, 48), (64, 4)]
    factors = [randn(*shape, seed=5 + i, device=device, scale=0.2) for i, shape in enumerate(shapes)]
    numbers = [randn(48, 64, seed=1), randn(48, 64, seed=2), randn(64, 48, seed=3)]
    weights = [store((one * 0.1).to(device, torch.bfloat16)) for one in numbers]

    def layers(factors):
        return [LoRALayer(weight, None, (LoRA(a, b),)) for weight, a, b in zip(weights, factors[::2], factors[1::2])]

    tensors = randn(11, 64, device=device, **BF16), *factors
    ours, upstream = run(lambda x, *factors: lora_mlp(x, *layers(factors)), tensors)
    wide = [tensor.double() for tensor in tensors]
    truth, _ = run(lambda x, *factors: lora_mlp_reference(x, *layers(factors)), wide, upstream)
    assert all(error < 0.2 for error in errors(ours, truth))


def test_a_stored_weight_that_does_not_fit_is_refused(device):
    a, b = torch.ones(2, 32, device=device), torch.ones(48, 2, device=device)
    with pytest.raises(ValueError, match=r"`weight` is \(48, 64\) in fp8 on .* it must be \(any, 32\)"):
        lora_linear(torch.ones(3, 32, device=device), weight_of(device), None, a, b)


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compiles_ahead_of_time(target, monkeypatch):
    for module in (stored, row_cast):
        monkeypatch.setattr(module, "use_triton", lambda tensor: True)
    with recorded_launches() as launches:
        transposed_codes(Fp8Weight(torch.zeros(256, 128, dtype=torch.uint8), torch.ones(256, 1)))
        row_cast.cast_scaled_rows(torch.zeros(64, 4096, **BF16), torch.ones(4096))
    assert len(launches) == 2
    for launch in launches:
        compile_launch(launch, target)
