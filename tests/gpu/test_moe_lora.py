"""Adapters on experts on a GPU: as exact as W + s B A, and without its memory, at the shapes of a real layer."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.moe.experts import ExpertLoRA, moe_experts

pytestmark = pytest.mark.gpu

TOKENS, TOP_K, EXPERTS, HIDDEN, INTERMEDIATE = 4096, 8, 64, 2048, 768
SCALING = 2.0


def operands(device, rank, transposed=False, dtype=torch.bfloat16):
    """Hidden states, choices and their weights, frozen weights in `dtype`, and adapters in fp32."""
    torch.manual_seed(0)

    def randn(*shape, scale):
        return (scale * torch.randn(shape, device=device)).to(dtype)

    hidden = randn(TOKENS, HIDDEN, scale=1.0).requires_grad_()
    weights, index = torch.randn(TOKENS, EXPERTS, device=device).softmax(-1).topk(TOP_K)
    layers = []
    for inputs, outputs in ((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)):
        weight = randn(EXPERTS, outputs, inputs, scale=inputs**-0.5)
        a, b = randn(EXPERTS, rank, inputs, scale=inputs**-0.5), randn(EXPERTS, outputs, rank, scale=0.1)
        factors = [each.float().requires_grad_() for each in (a, b)]
        layers.append([weight.mT.contiguous() if transposed else weight, *factors])
    return hidden, index, weights.requires_grad_(), layers


def ours(hidden, index, weights, layers, transposed=False):
    (first, *first_adapter), (second, *second_adapter) = layers
    adapters = [[ExpertLoRA(*adapter, SCALING)] for adapter in (first_adapter, second_adapter)]
    return moe_experts(
        *(hidden, index, weights, first, second),
        transposed=transposed,
        gate_up_adapters=adapters[0],
        down_adapters=adapters[1],
    )


def adapted(hidden, index, weights, layers, transposed=False):
    """On W + s B A, as PEFT makes it."""
    parameters = []
    for weight, a, b in layers:
        left, right = (a.mT, b.mT) if transposed else (b, a)
        parameters.append(torch.baddbmm(weight, left.to(weight.dtype), right.to(weight.dtype), alpha=SCALING))
    return moe_experts(hidden, index, weights, *parameters, transposed=transposed)


def gradients(function, case, upstream, **options):
    hidden, _, weights, layers = case
    output = function(*case, **options)
    leaves = [hidden, weights, *(factor for layer in layers for factor in layer[1:])]
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rank", "dtype"), [(4, torch.bfloat16), (16, torch.float16), (64, torch.bfloat16)], ids=str)
def test_no_worse_than_adapted_weights(device, rank, dtype, transposed):
    """In bf16 torch's grouped matmul may take the products, in fp16 they are Triton's."""
    hidden, index, weights, layers = case = operands(device, rank, transposed, dtype)
    upstream = torch.randn(TOKENS, HIDDEN, device=device).to(dtype)
    with torch.device(device):
        exact = (
            hidden.detach().double().requires_grad_(),
            index,
            weights.detach().double().requires_grad_(),
            [[each.detach().double().requires_grad_(each.requires_grad) for each in layer] for layer in layers],
        )
    truth = gradients(adapted, exact, upstream.double(), transposed=transposed)
    del exact
    results = [gradients(function, case, upstream, transposed=transposed) for function in (ours, adapted)]
    for position, (our, their, true) in enumerate(zip(*results, truth)):
        assert our.dtype == their.dtype
        error, allowed = ((each.double() - true).norm() / true.norm() for each in (our, their))
        assert error <= 1.1 * allowed + 2**-9, position


def test_memory_is_that_of_the_activations(device):
    case = operands(device, 16)
    weights = sum(layer[0].nbytes for layer in case[3])

    def kept_and_peak(function):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = function(*case)
        kept = torch.cuda.memory_allocated() - before - output.nbytes
        leaves = [case[0], *(factor for layer in case[3] for factor in layer[1:])]
        torch.autograd.grad(output, leaves, torch.ones_like(output))
        return kept, torch.cuda.max_memory_allocated() - before

    pre = TOKENS * TOP_K * 2 * INTERMEDIATE * 2
    kept, peak = kept_and_peak(ours)
    adapted_kept, adapted_peak = kept_and_peak(adapted)
    assert kept <= 1.05 * pre
    assert adapted_kept >= pre + weights
    assert peak < adapted_peak - weights
