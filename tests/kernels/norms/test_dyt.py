"""DyT's tanh for arguments of every size, and rows wider than a tile."""

import pytest
import torch

from liger_trainer.liger.operators import dyt as dyt_module
from liger_trainer.liger.operators.dyt import dyt, dyt_reference
from tests.accuracy import assert_as_accurate


@pytest.mark.kernel
def test_tanh_and_its_derivative_have_no_cancellation(device):
    x = torch.logspace(-20, 1.8, 400, device=device)
    x = torch.cat((-x, x))[:, None].requires_grad_()
    one = torch.ones(1, device=device)
    y = dyt(x, one, one)
    (dx,) = torch.autograd.grad(y.sum(), x)
    exact = x.detach().double()
    torch.testing.assert_close(y.double(), torch.tanh(exact), rtol=5e-7, atol=0)
    derivative = 4 * torch.exp(-2 * exact.abs()) / (1 + torch.exp(-2 * exact.abs())) ** 2
    inside = exact.abs() < 40  # beyond, the derivative of fp32 is 0
    torch.testing.assert_close(dx.double()[inside], derivative[inside], rtol=2e-5, atol=0)


@pytest.mark.kernel
def test_infinity_and_nan(device):
    x = torch.tensor([[float("inf")], [-float("inf")], [float("nan")], [1e30]], device=device)
    y = dyt(x, torch.ones(1, device=device), torch.full((1,), 2.0, device=device)).flatten().tolist()
    assert y[:2] == [2.0, -2.0]
    assert y[2] != y[2]
    assert y[3] == 2.0


@pytest.mark.kernel
@pytest.mark.parametrize("alpha_shape", [(), (1,)])
@pytest.mark.parametrize("with_beta", [True, False])
def test_wide_rows_and_either_shape_of_alpha(device, monkeypatch, alpha_shape, with_beta):
    monkeypatch.setattr(dyt_module, "num_sms", lambda device: 1)
    x = torch.randn(19, 2100, device=device)
    gamma = torch.randn(2100, device=device)
    beta = torch.randn(2100, device=device) if with_beta else None
    tensors = [x, torch.full(alpha_shape, 0.7, device=device), gamma, beta]
    upstream = [torch.randn_like(x) + x * gamma]  # the gradient of alpha does not cancel
    assert_as_accurate(dyt, dyt_reference, tensors, upstream)
