"""Gradients through an exchange of tokens: every process has to exchange in the backward, whatever its loss uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from liger_trainer.parallel import expert_exchange
from tests.calls import recorded_calls

TOKENS, EXPERTS, HIDDEN = 5, 4, 3


@pytest.fixture(autouse=True)
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class WithoutGradient(torch.autograd.Function):
    """A loss that has no gradient, as on a process whose tokens have no label."""

    @staticmethod
    def forward(ctx, *tensors):
        return sum(tensor.sum() for tensor in tensors)

    @staticmethod
    def backward(ctx, grad):
        return None, None


LOSSES = {
    "rows alone": lambda rows, weights: rows.square().sum(),
    "weights alone": lambda rows, weights: weights.square().sum(),
    "none": WithoutGradient.apply,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_results_without_a_gradient_are_exchanged_as_zeros(loss, monkeypatch):
    hidden, weights = torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.rand(TOKENS, 2, requires_grad=True)
    chosen = torch.rand(TOKENS, EXPERTS).topk(2).indices
    exchange = expert_exchange.plan_exchange(chosen, EXPERTS, dist.group.WORLD)
    rows, arrived = expert_exchange.send(hidden, weights, exchange)
    exchanged = recorded_calls(monkeypatch, expert_exchange, "_all_to_all")
    LOSSES[loss](rows, arrived).backward()
    assert len(exchanged) == 2
    torch.testing.assert_close(hidden.grad, 4 * hidden.detach() if loss == "rows alone" else torch.zeros_like(hidden))
    expected = 2 * weights.detach() if loss == "weights alone" else torch.zeros_like(weights)
    torch.testing.assert_close(weights.grad, expected)


def test_an_output_without_a_gradient_is_sent_back_as_zeros(monkeypatch):
    chosen = torch.rand(TOKENS, EXPERTS).topk(2).indices
    exchange = expert_exchange.plan_exchange(chosen, EXPERTS, dist.group.WORLD)
    y = torch.randn(2 * TOKENS, HIDDEN, requires_grad=True)
    output = expert_exchange.bring_back(y, exchange)
    exchanged = recorded_calls(monkeypatch, expert_exchange, "_all_to_all")
    WithoutGradient.apply(output, output).backward()
    assert len(exchanged) == 1
    assert not y.grad.any()
