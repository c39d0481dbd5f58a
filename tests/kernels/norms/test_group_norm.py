"""GroupNorm with groups split over several programs, and with sums that would cancel."""

import pytest
import torch
import torch.nn.functional as F

from liger_trainer.liger.operators import group_norm as group_norm_module
from liger_trainer.liger.operators.group_norm import group_norm, group_norm_reference
from tests.accuracy import assert_as_accurate


@pytest.fixture(params=[1, 3, 100])
def several_programs_a_group(request, monkeypatch):
    """Small tiles, none of which holds a group, and from one program for many tiles to one for each."""
    monkeypatch.setattr(group_norm_module, "_TILE", 16)
    monkeypatch.setattr(group_norm_module, "_WHOLE_FORWARD", 1)
    monkeypatch.setattr(group_norm_module, "_WHOLE_BACKWARD", 1)
    monkeypatch.setattr(group_norm_module, "_PROGRAMS_PER_SM", request.param)
    monkeypatch.setattr(group_norm_module, "num_sms", lambda device: 1)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("shape", "num_groups", "dtype", "parameters"),
    [
        ((2, 6, 5, 7), 3, torch.bfloat16, "weight and bias"),
        ((2, 6), 2, torch.float32, "bias"),
        ((1, 40, 16), 5, torch.float32, "weight"),
        ((2, 3, 70), 3, torch.float32, "none"),
        ((2, 5, 33), 1, torch.float32, "weight and bias"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("several_programs_a_group")
def test_spread_groups_are_as_accurate_as_eager(device, shape, num_groups, dtype, parameters):
    x = torch.randn(shape, device=device, dtype=dtype) * 2 + 1
    weight, bias = (
        torch.randn(shape[1], device=device, dtype=dtype) if name in parameters else None for name in ("weight", "bias")
    )

    def function(x, weight, bias):
        return group_norm(x, num_groups, weight, bias)

    def reference(x, weight, bias):
        return group_norm_reference(x, num_groups, weight, bias)

    assert_as_accurate(function, reference, (x, weight, bias))


def assert_a_mean_far_from_zero_costs_nothing(device):
    """E[x^2] - E[x]^2 in fp32 has no digit right here."""
    x = torch.randn(2, 4, 50, device=device) + 8192
    # Near 8192 fp32 has steps of 2**-10: one for the mean and one for the difference.
    torch.testing.assert_close(group_norm(x, 2), F.group_norm(x.double(), 2).float(), rtol=1e-3, atol=2 * 2.0**-10)


@pytest.mark.kernel
def test_a_mean_far_from_zero(device):
    assert_a_mean_far_from_zero_costs_nothing(device)


@pytest.mark.kernel
@pytest.mark.usefixtures("several_programs_a_group")
def test_a_mean_far_from_zero_in_spread_groups(device):
    assert_a_mean_far_from_zero_costs_nothing(device)


@pytest.mark.kernel
@pytest.mark.usefixtures("several_programs_a_group")
def test_only_parameters_with_gradients(device):
    x, weight = torch.randn(2, 6, 50, device=device), torch.randn(6, device=device)
    bias = torch.zeros(6, device=device, requires_grad=True)
    (dbias,) = torch.autograd.grad(group_norm(x, 3, weight, bias).sum(), bias)
    torch.testing.assert_close(dbias, torch.full_like(bias, 100.0))


@pytest.mark.kernel
def test_channels_last(device):
    x = torch.randn(2, 6, 5, 7, device=device).to(memory_format=torch.channels_last).requires_grad_()
    y = group_norm(x, 3)
    assert y.is_contiguous()
    dy = torch.randn(2, 6, 5, 7, device=device).to(memory_format=torch.channels_last)
    truth = F.group_norm(x, 3)
    torch.testing.assert_close(y, truth)
    torch.testing.assert_close(torch.autograd.grad(y, x, dy), torch.autograd.grad(truth, x, dy), rtol=1e-4, atol=1e-5)
