"""LoRA on a GPU: as exact as eager PyTorch under autocast, and with less memory, at the shapes of a real layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from liger_trainer.kernels.lora.lora import LoRA, LoRALayer, lora_linears
from liger_trainer.kernels.lora.lora_mlp import lora_mlp

pytestmark = pytest.mark.gpu

TOKENS, HIDDEN, INTERMEDIATE, RANK = 4096, 2048, 5632, 16
WIDTHS = ((HIDDEN, INTERMEDIATE), (HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN))


def leaves(device, wide):
    """x and, for each layer, a frozen W in bf16, and A and B in `wide`."""
    torch.manual_seed(0)

    def randn(*shape, scale):
        return (scale * torch.randn(shape, device=device)).bfloat16()

    x, layers = randn(TOKENS, HIDDEN, scale=1.0).requires_grad_(), []
    for inputs, outputs in WIDTHS:
        a, b = randn(RANK, inputs, scale=inputs**-0.5), randn(outputs, RANK, scale=0.1)
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


@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
def test_the_mlp_rounds_no_worse(wide, device):
    x, layers = leaves(device, wide)
    dy = torch.randn(TOKENS, HIDDEN, device=device).bfloat16()
    exact_x = x.detach().double().requires_grad_()
    exact_layers = [[each.detach().double().requires_grad_(each.requires_grad) for each in layer] for layer in layers]
    truth = gradients(peft_mlp, exact_x, exact_layers, dy.double())
    with torch.autocast(device, torch.bfloat16):
        ours, eager = (gradients(function, x, layers, dy) for function in (ours_mlp, peft_mlp))
    for index, (our, their, true) in enumerate(zip(ours, eager, truth)):
        assert our.dtype == their.dtype
        error, allowed = ((each.double() - true).norm() / true.norm() for each in (our, their))
        assert error <= 1.1 * allowed, index


def test_the_mlp_keeps_no_copies(device):
    x, layers = leaves(device, torch.float32)

    def kept(function):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with torch.autocast(device, torch.bfloat16):
            y = function(x, layers)
        return torch.cuda.memory_allocated() - before - y.nbytes

    gate_and_up, columns = 2 * TOKENS * INTERMEDIATE * 2, 3 * RANK * TOKENS * 2
    assert kept(ours_mlp) <= gate_and_up + columns + 2**20
    assert kept(peft_mlp) > 2 * gate_and_up


def test_masked_layers_and_narrow_ranks(device):
    """Columns of z that start at no multiple of 16 bytes, and masks."""
    x, layers = leaves(device, torch.float32)
    mask = torch.rand(TOKENS, HIDDEN, device=device) < 0.9
    narrow = [(w, a[:rank].contiguous(), b[:, :rank].contiguous()) for rank, (w, a, b) in zip((3, 5), layers)]
    for seen in (None, mask):
        ys = lora_linears(x, [LoRALayer(w, None, (LoRA(a, b, 0.5, seen),)) for w, a, b in narrow])
        for y, (w, a, b) in zip(ys, narrow):
            masked = x.double() if seen is None else x.double() * seen
            expected = F.linear(x.double(), w.double()) + 0.5 * masked @ a.double().T @ b.double().T
            assert (y.double() - expected).norm() <= 2**-8 * expected.norm()
        assert all(each.isfinite().all() for each in torch.autograd.grad(sum(y.sum() for y in ys), [x, *layers[0][1:]]))
