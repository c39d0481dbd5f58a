"""lora_mlp and lora_down: values and gradients, what is saved, fused projections; a real layer on a GPU."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.activation import GATED
from liger_trainer.kernels.lora import lora_mlp as operators
from liger_trainer.kernels.lora.lora import LoRA, LoRALayer
from liger_trainer.kernels.lora.lora_mlp import lora_down, lora_mlp, lora_mlp_reference
from liger_trainer.patching.binding import bind_forward
from liger_trainer.patching.mlps import _NAMES, _VARIANTS, gated_mlp_forward
from tests.accuracy import as_large_as, assert_as_accurate, errors, seeded_randn
from tests.calls import recorded_calls
from tests.kernels.lora.test_lora import saved_for_backward
from tests.patching.test_lora import adapted, assert_same, loss_and_gradients

HIDDEN, INTERMEDIATE = 16, 24
SHAPES = [(2, 5, HIDDEN)]
for out, width, rank in ((INTERMEDIATE, HIDDEN, 2), (INTERMEDIATE, HIDDEN, 3), (HIDDEN, INTERMEDIATE, 4)):
    SHAPES += [(out, width), (rank, width), (out, rank)]
ACTIVATIONS = [{}, {"limit": 0.5}, *({"activation": name} for name in GATED if name != "silu")]


def on_layers(mlp, masks=(None, None, None), **options):
    """`mlp` as a function of x and, for each layer, W, A and B."""

    def run(x, *parameters):
        triples = zip(*[iter(parameters)] * 3)
        layers = [LoRALayer(w, None, (LoRA(a, b, 0.5, mask),)) for (w, a, b), mask in zip(triples, masks)]
        return mlp(x, *layers, **options)

    return run


def tensors(device, dtype=torch.float32):
    return [seeded_randn(*shape, seed=i, dtype=dtype, device=device, scale=0.5) for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", ACTIVATIONS, ids=str)
def test_layers_with_biases_are_the_reference(options, masked):
    x = seeded_randn(2, 5, HIDDEN, dtype=torch.float64).requires_grad_()
    leaves, layers = [x], []
    for seed, (out, width, rank) in enumerate(((24, 16, 2), (24, 16, 3), (16, 24, 4))):
        shapes = (out, width), (out,), (rank, width), (out, rank)
        w, bias, a, b = (
            seeded_randn(*shape, seed=10 * seed + i, dtype=torch.float64, scale=0.5).requires_grad_()
            for i, shape in enumerate(shapes)
        )
        mask = torch.rand(2, 5, width) < 0.7 if masked else None
        leaves += [w, bias, a, b]
        layers.append(LoRALayer(w, bias, (LoRA(a, b, 0.5, mask),)))
    ours, expected = (mlp(x, *layers, **options) for mlp in (lora_mlp, lora_mlp_reference))
    torch.testing.assert_close(ours, expected)
    factors = torch.arange(ours.numel(), dtype=ours.dtype).cos().view(ours.shape)
    got, right = (torch.autograd.grad((y * factors).square().sum(), leaves) for y in (ours, expected))
    torch.testing.assert_close(got, right)


def test_errors_name_the_argument():
    x = torch.zeros(3, HIDDEN)
    with pytest.raises(ValueError, match="`activation` is 'relu'"):
        lora_down(x, x, LoRALayer(torch.zeros(8, HIDDEN)), "relu")
    with pytest.raises(ValueError, match=r"`limit` is 1\.0"):
        lora_down(x, x, LoRALayer(torch.zeros(8, HIDDEN)), "gelu", limit=1.0)


@pytest.mark.kernel
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_accurate_as_eager(dtype, options, masked, device):
    generator = torch.Generator().manual_seed(0)
    widths = (HIDDEN, HIDDEN, INTERMEDIATE)
    masks = [(torch.rand(2, 5, n, generator=generator) < 0.7).to(device) if masked else None for n in widths]
    upstream = [seeded_randn(2, 5, HIDDEN, seed=50, device=device)]
    ours, eager = (on_layers(mlp, masks, **options) for mlp in (lora_mlp, lora_mlp_reference))
    if dtype == torch.float32:
        assert_as_accurate(ours, eager, tensors(device, dtype), upstream)
        return
    # Errors of a few numbers vary by chance, so those of all results are added.
    leaves = [tensor.requires_grad_() for tensor in tensors(device, dtype)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(eager(*wide), wide, upstream[0].double())

    def errors_of(function):
        return errors(torch.autograd.grad(function(*leaves), leaves, upstream[0].to(dtype)), truth)

    rounding = torch.finfo(dtype).eps / 2
    allowed = sum(as_large_as(error, leaf.numel(), rounding) for error, leaf in zip(errors_of(eager), leaves))
    assert sum(errors_of(ours)) <= allowed


@pytest.mark.kernel
@pytest.mark.parametrize("needed", range(len(SHAPES)))
def test_every_gradient_on_its_own(needed, device):
    leaves = tensors(device)
    leaves[needed].requires_grad_()
    ours, eager = (on_layers(mlp)(*leaves) for mlp in (lora_mlp, lora_mlp_reference))
    got, expected = (torch.autograd.grad(y.square().mean(), leaves[needed]) for y in (ours, eager))
    torch.testing.assert_close(got, expected)


NAMES = [f"{layer}_{parameter}" for layer in ("gate", "up", "down") for parameter in "wab"]


@pytest.mark.kernel
@pytest.mark.parametrize("index", range(1, len(SHAPES)), ids=NAMES)
def test_parameters_of_another_size(index, device):
    """A, B and W whose sizes do not fit are refused, so none is read past its end."""
    for given in (lambda x: x[:-1], lambda x: x[:, :-1]):
        parameters = tensors(device)
        parameters[index] = given(parameters[index]).contiguous()
        with pytest.raises(ValueError, match=r"must (be|have)"):
            on_layers(lora_mlp)(*parameters)


@pytest.mark.kernel
def test_the_product_is_not_saved(device):
    half = torch.bfloat16
    leaves = [leaf.requires_grad_(len(leaf) < 5) for leaf in tensors(device, half)]  # x and A
    leaves = [leaf if leaf.shape[-1] > 4 else leaf.detach().float().requires_grad_() for leaf in leaves]  # and B
    ours = saved_for_backward(lambda: on_layers(lora_mlp)(*leaves), *leaves[1:])
    gate_or_up = ((2, 5, INTERMEDIATE), half)
    z, stacked_a = ((2, 5, 5), half), ((5, HIDDEN), half)
    no_columns = ((10, 0), half)  # z of the layers that get no adapter: gate, up and the stacked A
    assert ours == [z, ((2, 5, HIDDEN), half), gate_or_up, gate_or_up, stacked_a, no_columns]


@pytest.mark.kernel
def test_a_checkpoint_does_not_repeat_the_down_projection(device, monkeypatch):
    """The recomputation stops at the last saved tensor, as it does with torch's linear layer."""
    calls = recorded_calls(monkeypatch, operators, "lora_down_product")
    leaves = [leaf.requires_grad_() for leaf in tensors(device)]

    def layer(*given):
        return given[0] + on_layers(lora_mlp)(*given)

    def gradients(run):
        calls.clear()
        return torch.autograd.grad(run(layer, *leaves).square().sum(), leaves)

    expected = gradients(lambda layer, *given: layer(*given))
    got = gradients(functools.partial(checkpoint, use_reentrant=False))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert len(calls) == 1


@pytest.mark.kernel
def test_a_fused_projection_and_a_retained_graph(device):
    gate_up = seeded_randn(2, 5, 2 * INTERMEDIATE, device=device).requires_grad_()
    w, a, b = tensors(device)[-3:]
    a.requires_grad_()
    y = lora_down(gate_up * 1.0, None, LoRALayer(w, None, (LoRA(a, b),)), inplace_backward=True)
    gate, up = gate_up.chunk(2, dim=-1)
    h = F.silu(gate) * up
    expected = torch.autograd.grad((F.linear(h, w) + F.linear(F.linear(h, a), b)).square().sum(), (gate_up, a))
    for keep in (True, False):
        torch.testing.assert_close(torch.autograd.grad(y.square().sum(), (gate_up, a), retain_graph=keep), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("family", ["llama", "phi3", "gemma"])
def test_patched_mlps_of_a_model(family, device, monkeypatch):
    """Bound without the probe, as Triton's interpreter rounds to bf16 in its own way."""
    calls = recorded_calls(monkeypatch, operators, "lora_down_product")
    # A GPU draws a mask in the order of memory, in which gate and up are strided slices here.
    model, batch = adapted(family, lora_dropout=0.1 if device == "cpu" else 0.0)
    model, batch = model.to(device), {name: tensor.to(device) for name, tensor in batch.items()}
    expected = loss_and_gradients(model, batch)
    variant = _VARIANTS[1 if family == "gemma" else 0]
    mlps = [module for name, module in model.named_modules() if name.endswith(".mlp")]
    for mlp in mlps:
        argument = "hidden_states" if family == "phi3" else "x"
        names = next(names for names in _NAMES if all(hasattr(mlp, name) for name in names))
        bind_forward(mlp, gated_mlp_forward(argument, names, variant, False, True))
    assert_same(loss_and_gradients(model, batch), expected)
    assert len(calls) == len(mlps) == 2


# ---------------------------------------------------------------------------------------------------------------------
# A real layer on a GPU
# ---------------------------------------------------------------------------------------------------------------------

LAYER = types.SimpleNamespace(tokens=4096, hidden=2048, intermediate=5632, rank=16)


def leaves(device, wide):
    """x and, for each layer, a frozen W in bf16, and A and B in `wide`."""
    widths = ((LAYER.hidden, LAYER.intermediate),) * 2 + ((LAYER.intermediate, LAYER.hidden),)
    torch.manual_seed(0)

    def randn(*shape, scale):
        return (scale * torch.randn(shape, device=device)).bfloat16()

    x, layers = randn(LAYER.tokens, LAYER.hidden, scale=1.0).requires_grad_(), []
    for inputs, outputs in widths:
        a, b = randn(LAYER.rank, inputs, scale=inputs**-0.5), randn(outputs, LAYER.rank, scale=0.1)
        weight = randn(outputs, inputs, scale=inputs**-0.5)
        layers.append([weight, *(each.to(wide).requires_grad_() for each in (a, b))])
    return x, layers


def peft_layer(x, weight, a, b):
    base = F.linear(x, weight)
    return (base + F.linear(F.linear(x.to(a.dtype), a), b) * 2.0).to(base.dtype)


def peft_mlp(x, layers):
    gate, up, down = layers
    return peft_layer(F.silu(peft_layer(x, *gate)) * peft_layer(x, *up), *down)


def ours_mlp(x, layers):
    return lora_mlp(x, *(LoRALayer(w, None, (LoRA(a, b, 2.0),)) for w, a, b in layers))


def gradients(function, x, layers, dy):
    y = function(x, layers)
    return [y.detach(), *torch.autograd.grad(y, [x, *(each for layer in layers for each in layer[1:])], dy)]


@pytest.mark.gpu
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
def test_the_mlp_rounds_no_worse(wide, device):
    x, layers = leaves(device, wide)
    dy = torch.randn(LAYER.tokens, LAYER.hidden, device=device).bfloat16()
    exact_x = x.detach().double().requires_grad_()
    exact_layers = [[each.detach().double().requires_grad_(each.requires_grad) for each in layer] for layer in layers]
    truth = gradients(peft_mlp, exact_x, exact_layers, dy.double())
    with torch.autocast(device, torch.bfloat16):
        ours, eager = (gradients(function, x, layers, dy) for function in (ours_mlp, peft_mlp))
    for index, (our, their, true) in enumerate(zip(ours, eager, truth)):
        assert our.dtype == their.dtype
        error, allowed = ((each.double() - true).norm() / true.norm() for each in (our, their))
        assert error <= 1.1 * allowed, index


@pytest.mark.gpu
def test_the_mlp_saves_no_copies(device):
    x, layers = leaves(device, torch.float32)

    def held(function):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast(device, torch.bfloat16):
            y = function(x, layers)
        return torch.cuda.memory_allocated() - before - y.nbytes

    gate_and_up, columns = 2 * LAYER.tokens * LAYER.intermediate * 2, 3 * LAYER.rank * LAYER.tokens * 2
    assert held(ours_mlp) <= gate_and_up + columns + 2**20
    assert held(peft_mlp) > 2 * gate_and_up
