"""Policy losses through the row kernel against float64, under the interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from liger_trainer.kernels.parity.grpo_loss import LOSS_TYPES, grpo_loss
from liger_trainer.kernels.runtime import use_triton


@pytest.fixture(autouse=True)
def _kernels_run(device: str) -> None:
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")


def _case(device: str, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(3, 5, 200, generator=generator)
    tensors = {
        "completion_ids": torch.randint(0, 200, (3, 4), generator=generator),
        "advantages": torch.tensor([1.0, -0.5, 0.3]),
        "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]),
        "ref_log_probs": -torch.rand(3, 4, generator=generator) - 5.0,
    }
    return {"logits": logits.to(dtype).to(device), **{name: value.to(device) for name, value in tensors.items()}}


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_against_float64(device: str, loss_type: str) -> None:
    case = _case(device, torch.float32)
    logits = case.pop("logits").requires_grad_()
    double = logits.detach().double().requires_grad_()
    options = {"loss_type": loss_type, "beta": 0.1, "temperature": 0.7}
    ours, exact = grpo_loss(logits, **case, **options), grpo_loss(double, **case, **options)
    torch.testing.assert_close(ours.loss.double(), exact.loss, atol=1e-5, rtol=1e-5)
    (gradient,), (truth,) = torch.autograd.grad(ours.loss, logits), torch.autograd.grad(exact.loss, double)
    torch.testing.assert_close(gradient.double(), truth, atol=1e-6, rtol=1e-4)


def test_inplace_backward_writes_over_the_logits_and_no_other_does(device: str) -> None:
    case = _case(device, torch.bfloat16)
    leaf = case.pop("logits").requires_grad_()
    gradients = []
    for inplace in (False, True):
        logits = leaf * 1.0
        before = logits.detach().clone()
        grpo_loss(logits, **case, beta=0.1, inplace_backward=inplace).loss.backward()
        assert logits.detach().equal(before) != inplace
        gradients.append(leaf.grad.clone())
        leaf.grad = None
    assert gradients[0].equal(gradients[1])
