"""A loss whose gradient is made in the forward, by the row kernel, under the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.head.linear_log_probs import linear_log_probs_reference
from liger_trainer.kernels.runtime import use_triton
from liger_trainer.losses import LigerFusedLinearDPOLoss

PAIRS, LENGTH, HIDDEN, VOCAB = 2, 3, 8, 70
ROW = 128 * 4  # bytes of an fp32 row of logits, padded to 64 columns


@pytest.mark.parametrize("rows", [2 * LENGTH, 100, 1])
def test_dpo_against_float64(device: str, rows: int) -> None:
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(device).requires_grad_()
        for shape in ((2 * PAIRS, LENGTH, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    target = torch.randint(0, VOCAB, (2 * PAIRS, LENGTH), generator=generator).to(device)
    target[1, 2] = target[2, 0] = -100
    loss = LigerFusedLinearDPOLoss(use_ref_model=False, compute_nll_loss=True, logits_memory=rows * ROW)
    value, (*_, chosen_logits, rejected_logits, nll, _, _) = loss(weight, hidden, target, bias)
    doubles = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    log_probs = linear_log_probs_reference(*doubles[:2], target, doubles[2])
    chosen, rejected = log_probs.sum(-1).chunk(2)
    mask = target != -100
    exact_nll = -log_probs[:PAIRS].sum() / mask[:PAIRS].sum()
    exact = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean() + exact_nll
    logits = torch.nn.functional.linear(*doubles)
    pairs = [
        (value, exact),
        (nll, exact_nll),
        (chosen_logits, logits[:PAIRS][mask[:PAIRS]].mean()),
        (rejected_logits, logits[PAIRS:][mask[PAIRS:]].mean()),
        *zip(torch.autograd.grad(value, (hidden, weight, bias)), torch.autograd.grad(exact, doubles)),
    ]
    for mine, right in pairs:
        torch.testing.assert_close(mine.double(), right, atol=2e-5, rtol=2e-5)
