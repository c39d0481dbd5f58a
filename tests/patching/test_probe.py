"""The comparison behind every patch, on computations whose differences are known."""

from __future__ import annotations

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn

from liger_trainer.patching.probe import Probe, dummy_module, identity, neutral, projection
from liger_trainer.patching.trial import Trial
from tests.patching import toys


@pytest.fixture
def probe():
    probe = Probe(torch.device("cpu"))
    with probe.isolated():
        yield probe


def product(x, w):
    return x * w


def test_nothing_that_is_drawn_inside_changes_what_is_drawn_next():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    def seeded():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)

    seeded()
    expected = draw()
    seeded()
    with contextlib.suppress(KeyError), neutral(torch.device("cpu")):
        draw()
        raise KeyError
    assert draw() == expected


def test_equal(probe):
    agreement = Trial(product, [probe.randn(4, 5), probe.randn(5)]).compare(lambda x, w: w * x)
    assert agreement.equal
    assert agreement.error == agreement.distance == 0.0


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        (lambda x, w: x * w * (1 + 2e-5), "another formula"),
        (lambda x, w: x * w.detach() + (w - w.detach()) * 0.5, "another formula"),
        (lambda x, w: x * w.detach(), "has a gradient in one of the two only"),
        (lambda x, w: (x * w).double(), "torch.float64"),
        (lambda x, w: (x * w)[:1], "(1, 5)"),
        (lambda x, w: (x * w, x), "another number of tensors"),
        (lambda x, w: x * w * float("nan"), "another formula"),
        (lambda x, w: product(x), "the kernel did not run: TypeError"),
        (lambda x, w: (x * w).to(torch.bfloat16).to(x.dtype), "another formula"),
    ],
)
def test_not_equal(probe, ours, reason):
    agreement = Trial(product, [probe.randn(4, 5), probe.randn(5)]).compare(ours)
    assert not agreement.equal
    assert reason in agreement.reason


def test_more_rounding_than_the_original_is_refused_and_less_is_not(probe):
    tensors = [probe.randn(64, 6), probe.randn(6)]

    def rounding_thrice(x, w):
        return x * w * 1.25 / 1.25  # exact in float32 to its last place

    refused = Trial(product, tensors).compare(rounding_thrice)
    assert refused.error < 1e-6
    assert "in bfloat16 it rounds differently" in refused.reason
    assert Trial(rounding_thrice, tensors).compare(product).equal


def test_a_dummy_module_shares_nothing_that_can_be_changed():
    module = toys.Norm()
    module.register_forward_hook(lambda *args: 1 / 0)
    module.eval()
    weight = torch.zeros(3)
    twin = dummy_module(module, {"weight": weight}, {})
    assert type(twin) is toys.Norm
    assert twin.training
    assert twin.weight is weight
    assert twin.eps == module.eps
    assert not twin(torch.ones(2, 3)).any()
    twin.eps = 1.0
    twin.weight = None
    assert module.eps == 1e-2
    assert module.weight.shape == (8,)


def test_projection_is_a_linear_layer():
    weight = torch.arange(6.0).view(3, 2)
    x = torch.tensor([[1.0, -2.0]])
    torch.testing.assert_close(projection(weight)(x), x @ weight.T)


def test_identity_differs_by_attributes_and_activations():
    assert identity(toys.Norm()) == identity(toys.Norm())
    assert identity(toys.Norm()) != identity(toys.Norm(eps=1e-3))
    assert identity(toys.MLP(act=nn.SiLU())) == identity(toys.MLP(act=nn.SiLU()))
    assert identity(toys.MLP(act=nn.GELU())) != identity(toys.MLP(act=nn.GELU(approximate="tanh")))
    assert identity(toys.MLP(act=nn.SiLU())) != identity(toys.MLP(act=nn.GELU()))


def test_global_modes_come_back(probe):
    assert torch.is_grad_enabled()
    with torch.no_grad(), torch.device("meta"):
        with probe.isolated():
            assert torch.is_grad_enabled()
            assert torch.zeros(1).device.type == "cpu"
        assert not torch.is_grad_enabled()
        assert torch.zeros(1).is_meta
