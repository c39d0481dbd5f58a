"""lora_linear and lora_linears: values, gradients, what is saved, dtypes, autocast, errors; real sizes on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.kernels.lora.lora import (
    LoRA,
    LoRALayer,
    lora_linear,
    lora_linear_reference,
    lora_linears,
    lora_linears_reference,
)
from tests.accuracy import assert_as_accurate, seeded_randn
from tests.calls import saved_tensors

IN, TOKENS = 16, (2, 5)


def normal(*shape, seed, dtype=torch.float64, needs=True, scale=1.0):
    return seeded_randn(*shape, seed=seed, scale=scale).to(dtype).requires_grad_(needs)


def three_layers(dtype=torch.float64, mask=None, trained=True):
    """x and layers without an adapter, with one and with two, with and without biases."""
    x = normal(*TOKENS, IN, seed=1, dtype=dtype)
    weights = [normal(out, IN, seed=out, dtype=dtype, needs=trained) for out in (8, 12, 10)]
    bias = normal(8, seed=2, dtype=dtype, needs=trained)
    ranks = ((8, 2), (12, 3), (12, 4))
    a = [normal(rank, IN, seed=rank, dtype=dtype) for _, rank in ranks]
    b = [normal(out, rank, seed=10 * rank, dtype=dtype) for out, rank in ranks]
    leaves = [x, *weights, bias, *a, *b]

    def layers(leaves):
        _, w0, w1, w2, bias, a0, a1, a2, b0, b1, b2 = leaves
        return [
            LoRALayer(w0, bias, (LoRA(a0, b0, 1.5),)),
            LoRALayer(w1, None, (LoRA(a1, b1, 0.3, mask), LoRA(a2, b2, 2.0))),
            LoRALayer(w2),
        ]

    return leaves, layers


def gradients(outputs, leaves):
    loss = sum((y * torch.arange(y.numel(), dtype=y.dtype).cos().view(y.shape)).square().sum() for y in outputs)
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad])


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_layers_of_one_input_are_the_reference(masked, trained):
    mask = torch.rand(*TOKENS, IN, generator=torch.Generator().manual_seed(0)) < 0.7 if masked else None
    leaves, layers = three_layers(mask=mask, trained=trained)
    ours, expected = lora_linears(leaves[0], layers(leaves)), lora_linears_reference(leaves[0], layers(leaves))
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, leaves), gradients(expected, leaves))


@pytest.mark.parametrize("needed", range(11))
def test_every_gradient_on_its_own(needed):
    leaves, layers = three_layers()
    for index, leaf in enumerate(leaves):
        leaf.requires_grad_(index == needed)
    ours, expected = lora_linears(leaves[0], layers(leaves)), lora_linears_reference(leaves[0], layers(leaves))
    if needed == 3:  # the weight of the layer without an adapter
        ours, expected = ours[2:], expected[2:]
    torch.testing.assert_close(gradients(ours, leaves), gradients(expected, leaves))


def test_an_unused_result_and_no_tokens():
    leaves, layers = three_layers()
    outputs = lora_linears(leaves[0], layers(leaves))
    expected = lora_linears_reference(leaves[0], layers(leaves))
    used = [leaf for index, leaf in enumerate(leaves) if index in (0, 1, 5, 8)]
    torch.testing.assert_close(gradients(outputs[:1], used), gradients(expected[:1], used))
    x = torch.zeros(0, IN, dtype=torch.float64, requires_grad=True)
    y, *_ = lora_linears(x, layers(leaves))
    assert y.shape == (0, 8)
    (gradient,) = torch.autograd.grad(y.sum(), leaves[5])
    assert not gradient.any()


def test_gradcheck():
    leaves, layers = three_layers()
    assert torch.autograd.gradcheck(lambda *given: lora_linears(given[0], layers(given)), leaves)


@pytest.mark.parametrize("scaling", [1.0, 0.7, 16 / 8**0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_as_accurate_as_eager(dtype, scaling):
    shapes = (200, 64), (96, 64), (96,), (8, 64), (96, 8)
    tensors = [seeded_randn(*shape, seed=i, dtype=torch.bfloat16).to(dtype) for i, shape in enumerate(shapes)]
    upstream = [seeded_randn(200, 96, seed=9, dtype=torch.bfloat16)]
    assert_as_accurate(lora_linear, lora_linear_reference, tensors, upstream, scaling=scaling)


def eager_peft(x, weight, bias, a, b):
    """What PEFT's layer computes where the adapter is fp32 and x is not."""
    base = F.linear(x, weight, bias)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0).to(base.dtype)


def test_fp32_adapters_in_a_bf16_model():
    """At the size adapters have in training: x is not widened, their gradients are not rounded to bf16."""
    shapes = {"x": (200, 64), "weight": (96, 64), "bias": (96,), "a": (8, 64), "b": (96, 8)}
    scales = {"x": 1.0, "weight": 0.125, "bias": 1.0, "a": 0.125, "b": 0.02}

    def leaves(wide):
        for index, (name, shape) in enumerate(shapes.items()):
            value = seeded_randn(*shape, seed=index, scale=scales[name])
            value = value if name in "ab" else value.to(torch.bfloat16)
            yield (value.to(wide) if wide else value).requires_grad_()

    dy = seeded_randn(200, 96, seed=9, dtype=torch.bfloat16)

    def run(function, wide=None):
        inputs = list(leaves(wide))
        y = function(*inputs)
        return [y, *torch.autograd.grad(y, inputs, dy.to(y.dtype))]

    truth = run(eager_peft, torch.float64)
    ours = run(lambda *given: lora_linear(*given, 2.0))
    eager = run(eager_peft)
    assert [each.dtype for each in ours] == [each.dtype for each in eager]
    for index in (0, 1, 2, 3):
        error, allowed = ((each[index].double() - truth[index]).norm() for each in (ours, eager))
        assert error <= 1.1 * allowed + 1e-12, index
    for index in (4, 5):  # products of bf16 operands: less exact than those of fp32, but more than a bf16 result
        assert (ours[index].double() - truth[index]).norm() <= 2**-8 * truth[index].norm()
        assert not torch.equal(ours[index], ours[index].bfloat16().float())


@pytest.mark.parametrize("wide", ["parameters", "x"])
def test_autocast_casts_as_it_does_for_linear_layers(wide):
    x = normal(3, 5, IN, seed=0, dtype=torch.float32 if wide == "x" else torch.bfloat16)
    w = normal(8, IN, seed=1, dtype=torch.float32, needs=False)
    a, b = normal(2, IN, seed=2, dtype=torch.float32), normal(8, 2, seed=3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = lora_linear(x, w, None, a, b, 2.0)
        expected = F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0
    assert y.dtype == expected.dtype == torch.bfloat16
    assert (y.float() - expected.float()).norm() <= 4e-2 * expected.float().norm()
    got, wanted = (torch.autograd.grad(each.sum(), (x, a, b)) for each in (y, expected))
    assert [each.dtype for each in got] == [x.dtype, torch.float32, torch.float32]
    for one, other in zip(got, wanted):
        assert (one.float() - other.float()).norm() <= 4e-2 * other.float().norm()


def saved_for_backward(function, *parameters):
    """Shapes and dtypes of the tensors saved for backward except `parameters`, each storage once."""
    known = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    with saved_tensors() as saved:
        result = function()
    assert result.requires_grad
    kept = {each.untyped_storage().data_ptr(): (tuple(each.shape), each.dtype) for each in saved}
    return sorted((kept[each] for each in kept.keys() - known), key=lambda it: (it[0], str(it[1])))


def test_a_layer_saves_its_input_and_a_few_columns():
    half, wide = torch.bfloat16, torch.float32
    x = normal(40, 64, seed=0, dtype=half)
    weight = normal(96, 64, seed=1, dtype=half, needs=False)
    a, b = normal(8, 64, seed=2, dtype=wide), normal(96, 8, seed=3, dtype=wide)
    ours = saved_for_backward(lambda: lora_linear(x, weight, None, a, b), weight, a, b)
    assert ours == [((40, 8), half), ((40, 64), half)]
    eager = saved_for_backward(lambda: F.linear(x, weight) + F.linear(F.linear(x.to(wide), a), b), weight, a, b)
    assert ((40, 64), wide) in eager
    mask = torch.rand(40, 64) < 0.5
    masked = saved_for_backward(lambda: lora_linear(x, weight, None, a, b, 1.0, mask), weight, a, b)
    assert masked == [((40, 8), half), ((40, 64), half), ((40, 64), torch.bool)]


def test_errors_name_the_argument():
    x, w, a, b = torch.zeros(3, IN), torch.zeros(8, IN), torch.zeros(2, IN), torch.zeros(8, 2)
    with pytest.raises(ValueError, match=r"`weight` is \(8, 17\)"):
        lora_linear(x, torch.zeros(8, 17), None, a, b)
    with pytest.raises(ValueError, match=r"`bias` is \(7,\)"):
        lora_linear(x, w, torch.zeros(7), a, b)
    with pytest.raises(ValueError, match=r"`lora_a` is \(2, 15\)"):
        lora_linear(x, w, None, torch.zeros(2, 15), b)
    with pytest.raises(ValueError, match=r"`lora_b` is \(2, 8\)"):
        lora_linear(x, w, None, a, b.T)
    with pytest.raises(ValueError, match=r"`mask` is \(3, 16\) torch.float32"):
        lora_linear(x, w, None, a, b, 1.0, torch.zeros(3, IN))
    with pytest.raises(ValueError, match="`layers` is empty"):
        lora_linears(x, [])


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_masked_layers_and_narrow_ranks_of_a_real_size(masked, device):
    """The columns of z start at addresses that are no multiples of 16 bytes."""
    torch.manual_seed(0)

    def randn(*shape, scale=2048**-0.5):
        return (scale * torch.randn(shape, device=device)).bfloat16()

    x = randn(4096, 2048, scale=1.0).requires_grad_()
    mask = torch.rand(x.shape, device=device) < 0.9 if masked else None
    layers = []
    for rank in (3, 5):
        a, b = (each.float().requires_grad_() for each in (randn(rank, 2048), randn(5632, rank, scale=0.1)))
        layers.append((randn(5632, 2048), a, b))
    ys = lora_linears(x, [LoRALayer(w, None, (LoRA(a, b, 0.5, mask),)) for w, a, b in layers])
    for y, (w, a, b) in zip(ys, layers):
        seen = x.double() if mask is None else x.double() * mask
        expected = F.linear(x.double(), w.double()) + 0.5 * seen @ a.double().T @ b.double().T
        assert (y.double() - expected).norm() <= 2**-8 * expected.norm()
    leaves = [x, *layers[0][1:]]
    assert all(each.isfinite().all() for each in torch.autograd.grad(sum(y.sum() for y in ys), leaves))
