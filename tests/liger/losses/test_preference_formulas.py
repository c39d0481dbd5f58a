"""The formulas by themselves: derivatives in float64, and the ends of their range."""

from __future__ import annotations

import math

import pytest
import torch

from liger_trainer.liger.losses.preference_formulas import (
    DPO_LOSSES,
    DPOOptions,
    Pairs,
    contrastive,
    kto,
    log_odds,
    odds_ratio,
)


def _pairs(values: torch.Tensor) -> Pairs:
    lengths = torch.tensor([3, 5, 4, 1]), torch.tensor([2, 7, 4, 3])
    return Pairs(*values, *lengths)


@pytest.fixture
def values() -> torch.Tensor:
    """Log-probabilities of chosen, rejected, and of both under the reference, of four pairs."""
    generator = torch.Generator().manual_seed(0)
    return (-torch.rand(4, 4, generator=generator, dtype=torch.float64) - 0.1).requires_grad_()


@pytest.mark.parametrize("loss_type", DPO_LOSSES)
def test_derivatives_of_the_dpo_family(loss_type: str, values: torch.Tensor) -> None:
    options = DPOOptions(beta=0.7, label_smoothing=0.1)
    assert torch.autograd.gradcheck(lambda values: DPO_LOSSES[loss_type](_pairs(values), options), values)
    assert DPO_LOSSES[loss_type](_pairs(values), options).shape == (4,)


def test_derivatives_of_the_others(values: torch.Tensor) -> None:
    desirable = torch.tensor([True, False, False, True])
    assert torch.autograd.gradcheck(lambda values: odds_ratio(_pairs(values), 0.7), values)
    assert torch.autograd.gradcheck(lambda values: contrastive(_pairs(values), 0.7, 0.1, 0.5), values)
    for kl in (None, torch.tensor(0.2), values[1].detach()):
        assert torch.autograd.gradcheck(lambda ratio, kl=kl: kto(ratio, desirable, 0.7, kl), values[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_odds_from_the_impossible_to_the_certain(dtype: torch.dtype) -> None:
    log_prob = torch.tensor([-1e4, -90.0, -20.0, -math.log(2.0), -0.1, -1e-3, -1e-12, -1e-30, 0.0], dtype=dtype)
    log_prob.requires_grad_()
    odds = log_odds(log_prob)
    (slope,) = torch.autograd.grad(odds.sum(), log_prob)
    wide = log_prob.detach().double()[:-1]
    torch.testing.assert_close(odds[:-1].double(), wide - torch.log(-torch.expm1(wide)), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(slope[:-1].double(), -1.0 / torch.expm1(wide), rtol=1e-6, atol=0.0)
    assert odds[-1] > odds[-2]
    assert odds[-1].isfinite()
    assert slope[-1] == 0.0


def test_certain_preferences_do_not_overflow() -> None:
    far = torch.tensor([[-1.0] * 4, [-2000.0] * 4, [-2000.0] * 4, [-1.0] * 4], requires_grad=True)
    for loss_type, loss in DPO_LOSSES.items():
        if loss_type == "discopop":  # its exponential is not bounded, in the paper as here
            continue
        for values in (far, far.flip(0)):
            result = loss(_pairs(values), DPOOptions(0.1, 0.1)).sum()
            assert result.isfinite()
            assert torch.autograd.grad(result, far)[0].isfinite().all()
