"""The fused label smoother against the one of transformers."""

import pytest
import torch
from transformers.trainer_pt_utils import LabelSmoother

from liger_trainer.trainers.label_smoothing import FusedLabelSmoother


@pytest.mark.parametrize("shift_labels", [False, True])
@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(5.0)])
@pytest.mark.parametrize("epsilon", [0.1, 0.9])
def test_value_and_gradient(epsilon, num_items, shift_labels):
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 11, dtype=torch.float32)
    labels = torch.randint(0, 11, (2, 6))
    labels[0, :3] = -100
    results = []
    for smoother in (LabelSmoother(epsilon), FusedLabelSmoother(epsilon)):
        x = logits.clone().requires_grad_()
        loss = smoother({"logits": x}, labels, shift_labels=shift_labels, num_items_in_batch=num_items)
        loss.backward()
        results.append((loss.detach(), x.grad))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=1e-7)


def test_without_labels_it_is_a_zero_that_backpropagates():
    x = torch.randn(1, 4, 5, requires_grad=True)
    loss = FusedLabelSmoother(0.1)((x,), torch.full((1, 4), -100), shift_labels=True)
    loss.backward()
    assert loss.item() == 0.0
    assert not x.grad.any()
