"""LoRA on the packed weights of published checkpoints: against float64, what is saved and decoded, errors."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from liger_trainer.functional import LoRA, LoRALayer, lora_linear, lora_linears, lora_mlp
from liger_trainer.kernels.lora.lora import lora_linears_reference
from liger_trainer.kernels.lora.lora_mlp import lora_mlp_reference
from liger_trainer.kernels.lowbit import buffers
from liger_trainer.kernels.lowbit import decode as decoding
from liger_trainer.kernels.lowbit.decode import decode
from tests.calls import recorded_calls, saved_tensors
from tests.packed_weights import FORMATS, on, packed


@pytest.fixture(autouse=True)
def _free():
    buffers.free_buffers()


def leaf(*shape, dtype=torch.float64, device="cpu"):
    return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_()


def adapter(outputs, inputs, rank=3, **options):
    return LoRA(leaf(rank, inputs, **options), leaf(outputs, rank, **options), 0.5)


def in_float64(layer):
    """The layer with its weight decoded, and factors and bias of the same numbers; and the leaves among them."""
    adapters = [
        LoRA(*(part.detach().double().requires_grad_() for part in each[:2]), each[2]) for each in layer.adapters
    ]
    bias = None if layer.bias is None else layer.bias.detach().double().requires_grad_()
    return LoRALayer(decode(layer.weight, torch.float32).double(), bias, adapters)


def leaves_of(layers):
    biases = [layer.bias for layer in layers if layer.bias is not None]
    return [*biases, *(part for layer in layers for each in layer.adapters for part in each[:2])]


def results(function, x, layers):
    """The outputs, and the gradients of x, biases and factors."""
    outputs = function(x, layers)
    upstream = [torch.arange(y.numel(), device=y.device).cos().bfloat16().to(y.dtype).view(y.shape) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [x, *leaves_of(layers)], upstream)]


def assert_near(ours, expected, bound):
    for one, true in zip(ours, expected, strict=True):
        assert (one.double() - true).norm() <= bound * true.norm()


@pytest.mark.parametrize("name", FORMATS)
def test_layers_against_float64(name):
    """One layer with an adapter and a bias, and one without an adapter; decoded in fp32, the rest in float64."""
    x = leaf(2, 5, 64)
    layers = [LoRALayer(packed(name, 48, 64), leaf(48), [adapter(48, 64)]), LoRALayer(packed(name, 24, 64))]
    expected = results(lora_linears_reference, x, [in_float64(layer) for layer in layers])
    assert_near(results(lora_linears, x, layers), expected, 1e-12)


@pytest.mark.kernel
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_layers_of_the_kernels_against_float64(name, dtype, bound, device):
    x = leaf(20, 160, dtype=dtype, device=device)
    weights = [on(packed(name, *shape), device) for shape in ((136, 160), (24, 160))]
    layers = [
        LoRALayer(
            weights[0], leaf(136, device=device, dtype=dtype), [adapter(136, 160, dtype=torch.float32, device=device)]
        ),
        LoRALayer(weights[1]),
    ]
    wide = x.detach().double().requires_grad_()
    expected = results(lora_linears_reference, wide, [in_float64(layer) for layer in layers])
    assert_near(results(lora_linears, x, layers), expected, bound)


@pytest.mark.parametrize("name", ["fp8, blocks", "mxfp4", "int4, zeros"])
def test_an_mlp_against_float64(name):
    x, shapes = leaf(2, 5, 64), ((96, 64), (96, 64), (64, 96))
    layers = [LoRALayer(packed(name, *shape), None, [adapter(*shape)]) for shape in shapes]

    def outputs(mlp):
        return lambda x, layers: [mlp(x, *layers)]

    expected = results(outputs(lora_mlp_reference), x, [in_float64(layer) for layer in layers])
    assert_near(results(outputs(lora_mlp), x, layers), expected, 1e-12)


@pytest.mark.parametrize("name", ["fp8, blocks", "mxfp4", "nvfp4, ModelOpt", "gptq"])
def test_autograd_keeps_nothing_of_the_weight(name):
    """x and z, and the adapter; the codes are the model's, and would be offloaded if they were saved."""
    weight, x = packed(name, 48, 64), leaf(40, 64, dtype=torch.bfloat16)
    lora = adapter(48, 64, dtype=torch.float32)
    with saved_tensors() as saved:
        lora_linear(x, weight, None, *lora[:3]).sum()
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    z = 40 * 3 * 2
    assert sum(memory.values()) == x.nbytes + z + sum(each.nbytes for each in lora[:2])


def test_what_a_block_under_a_checkpoint_decodes(monkeypatch):
    """A weight in the forward, the recomputation and the backward; the last one is still there for the backward."""
    decodes = recorded_calls(monkeypatch, decoding, "_decode_")
    x, shapes = leaf(5, 64), ((96, 64), (64, 96))
    first, second = (LoRALayer(packed("mxfp4", *shape), None, [adapter(*shape)]) for shape in shapes)

    def block(x):
        return lora_linears(lora_linears(x, [first])[0], [second])[0].sin()

    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(decodes) == 5


def test_two_blocks_never_read_each_other_s_weight():
    x, layers = leaf(5, 64), [LoRALayer(packed("mxfp4", 64, 64), None, [adapter(64, 64)]) for _ in range(3)]

    def blocks(x, layers, function, kept):
        for layer in layers:
            block = lambda x, layer=layer: function(x, [layer])[0].tanh()  # noqa: E731
            x = block(x) if kept else checkpoint(block, x, use_reentrant=False)
        return [x]

    exact = results(lambda x, layers: blocks(x, layers, lora_linears_reference, True), x, [*map(in_float64, layers)])
    ours = results(lambda x, layers: blocks(x, layers, lora_linears, False), x, layers)
    assert_near(ours, exact, 1e-12)


def test_a_weight_that_does_not_fit_is_named():
    x = torch.zeros(2, 32)
    with pytest.raises(ValueError, match=r"`weight` is \(8, 64\) in a packed format on cpu; .* \(any, 32\)"):
        lora_linears(x, [LoRALayer(packed("mxfp4", 8, 64))])
    with pytest.raises(ValueError, match=r"`weight` is \(2, 8, 32\) in a packed format"):
        lora_linears(x, [LoRALayer(packed("mxfp4", 2, 8, 32))])
    weight = packed("mxfp4", 8, 32)
    with pytest.raises(ValueError, match=r"`weight.scales` is \(4, 1\)"):
        lora_linears(x, [LoRALayer(weight._replace(scales=weight.scales[:4]))])
