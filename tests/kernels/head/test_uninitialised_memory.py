"""The operators of an LM head on a CPU, in bf16, where new memory holds NaN: `tests/uninitialised.py`."""

from functools import partial

import pytest
import torch

from liger_trainer.functional import linear_cross_entropy, linear_kl, linear_log_probs
from liger_trainer.losses import LigerFusedLinearCPOLoss

TOKENS, HIDDEN, VOCAB = 40, 16, 500  # rows of logits are padded to 512


def grouped(hidden, weight, labels):
    loss = LigerFusedLinearCPOLoss()
    return loss(weight, hidden.view(2, TOKENS // 2, HIDDEN), labels.view(2, TOKENS // 2))[0]


OPERATORS = {
    "linear_cross_entropy": linear_cross_entropy,
    "linear_log_probs": lambda *head: linear_log_probs(*head).sum(),
    "linear_log_probs, recomputed": lambda *head: linear_log_probs(*head, retain_memory=0).sum(),
    "linear_kl": lambda hidden, weight, _: linear_kl(hidden, weight, hidden.detach() + 1, weight.detach()),
    "linear_grouped_loss": grouped,
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_no_gradient_depends_on_it(operator):
    """With AMX, torch reads past the rows of a padded operand: `liger_trainer.kernels.runtime.matmul_into`."""
    make = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    hidden, weight = (make(rows, HIDDEN).bfloat16().requires_grad_() for rows in (TOKENS, VOCAB))
    operator(hidden, weight, torch.arange(TOKENS)).backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
