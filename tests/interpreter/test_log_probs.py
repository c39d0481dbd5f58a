"""Log-probabilities of given logits from the row kernel against float64, under the interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.head.log_probs import log_probs, log_probs_reference
from liger_trainer.kernels.runtime import use_triton

ALL_OUTPUTS = ("entropy", "top1", "mean_logit", "sum_squared_probs")
LAYOUTS = {
    "rows": lambda x: x.flatten(0, 1),
    "batched": lambda x: x,
    "shifted": lambda x: x[:, :-1],
    "transposed": lambda x: x.transpose(0, 1),
    "strided vocabulary": lambda x: x[..., ::2],
}


@pytest.fixture(autouse=True)
def _kernels_run(device: str) -> None:
    if not use_triton(torch.empty(1, device=device)):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "logit_scale": -1.5, "temperature": 0.7}], ids=str)
def test_against_float64(options, layout, dtype, device):
    generator = torch.Generator().manual_seed(0)
    leaf = (3.0 * torch.randn(2, 4, 150, generator=generator)).to(dtype).to(device).requires_grad_()
    exact_leaf = leaf.detach().double().requires_grad_()
    results = []
    for function, x in ((log_probs, leaf), (log_probs_reference, exact_leaf)):
        logits = LAYOUTS[layout](x)
        target = torch.arange(logits[..., 0].numel(), device=device).view(logits.shape[:-1]) * 7
        target = target.masked_fill(target % 3 == 0, -100)
        found = function(logits, target, outputs=ALL_OUTPUTS, **options)
        factors = torch.linspace(-1.0, 2.0, target.numel(), device=device).view(target.shape).to(found.log_probs)
        loss = (found.log_probs * factors).sum() + (found.entropy * factors.square()).sum()
        values = [found.log_probs, *(getattr(found, name) for name in ALL_OUTPUTS)]
        results.append([*(value.detach() for value in values), *torch.autograd.grad(loss, x)])
    for ours, exact in zip(*results):
        tolerance = 2e-5 if ours.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(ours.to(exact.dtype), exact, rtol=tolerance, atol=tolerance)


def test_a_label_out_of_range_makes_its_token_nan_and_no_other(device):
    if device == "cpu":
        pytest.skip("on the CPU it is an error")
    logits = torch.randn(3, 20, device=device, requires_grad=True)
    found = log_probs(logits, torch.tensor([20, 3, -100], device=device))
    assert found.isnan().tolist() == [True, False, False]
