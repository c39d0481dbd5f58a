"""The kernels of the routers' auxiliary losses: values, gradients, layouts, ties, registration."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.library import opcheck

from liger_trainer.kernels.moe import router_statistics as operators
from liger_trainer.kernels.moe.load_balancing import load_balancing_loss, router_losses, router_losses_reference
from liger_trainer.kernels.moe.router import topk_softmax_routing
from tests.accuracy import seeded_randn


def both(function, tensors, top_k, mask):
    losses = function(tensors, top_k, mask)
    gradients = [torch.autograd.grad(loss, tensors, retain_graph=True) for loss in losses]
    return [*losses, *gradients[0], *gradients[1]]


@given(
    tokens=st.integers(1, 200),
    experts=st.integers(1, 70),
    top_k=st.integers(1, 8),
    masked=st.booleans(),
    transposed=st.booleans(),
)
@settings(max_examples=5, deadline=None)
def test_equals_the_reference_in_float64(tokens, experts, top_k, masked, transposed):
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    tensors = [seeded_randn(tokens, experts, seed=seed, scale=2.0, device=device) for seed in range(2)]
    if transposed:
        tensors = [logits.mT.contiguous().mT for logits in tensors]
    mask = torch.arange(tokens, device=device).remainder(3).sign() if masked and tokens > 1 else None
    exact = [logits.double().requires_grad_() for logits in tensors]
    ours = both(router_losses, [logits.requires_grad_() for logits in tensors], min(top_k, experts), mask)
    expected = both(router_losses_reference, exact, min(top_k, experts), mask)
    for mine, right in zip(ours, expected):
        torch.testing.assert_close(mine.double(), right, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype, device):
    tensors = [seeded_randn(50, 16, dtype=dtype, device=device).requires_grad_()]
    ours = both(router_losses, tensors, 3, None)
    exact = both(router_losses_reference, [logits.detach().double().requires_grad_() for logits in tensors], 3, None)
    torch.testing.assert_close(ours[:2], exact[:2], rtol=1e-5, atol=0.0, check_dtype=False)
    for mine, right in zip(ours[2:], exact[2:]):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), right, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_counts_of_equal_and_infinite_logits(device):
    """Every token has k experts: the first of equal logits, also where fewer than k are finite."""
    infinity = float("inf")
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0], [-infinity, 2.0, -infinity, -infinity, -3.0]], device=device)
    counts = operators.router_statistics([logits], None, 3)[:5]
    assert counts.tolist() == [2.0, 2.0, 1.0, 0.0, 1.0]


def test_zeros_of_either_sign_are_equal(device):
    """As they are to the router, which gives the token to the first of them."""
    logits = torch.tensor([[-0.0, 0.0, -1.0]], device=device)
    assert operators.router_statistics([logits], None, 1)[:3].tolist() == [1.0, 0.0, 0.0]
    assert topk_softmax_routing(logits, 1)[1].tolist() == [[0]]


def test_no_tokens(device):
    logits = torch.empty(0, 4, device=device).requires_grad_()
    statistics = operators.router_statistics([logits, logits], None, 2)
    assert statistics.tolist() == [0.0] * 9
    assert torch.autograd.grad(statistics.sum(), logits)[0].shape == (0, 4)


def test_a_padded_token_gets_no_gradient(device):
    logits = seeded_randn(6, 5, device=device).requires_grad_()
    mask = torch.tensor([1, 1, 0, 1, 0, 1], device=device)
    (gradient,) = torch.autograd.grad(load_balancing_loss(logits, 2, mask), logits)
    assert (gradient[mask == 0] == 0).all()
    assert (gradient[mask == 1] != 0).all()


def test_opcheck(device):
    tensors = [seeded_randn(6, 5, seed=seed, device=device).requires_grad_() for seed in range(2)]
    mask = torch.ones(6, device=device)
    opcheck(operators.router_statistics, (tensors, mask, 2))
    detached = [logits.detach() for logits in tensors]
    opcheck(operators.router_statistics_backward, (torch.randn(11, device=device), detached, mask))
