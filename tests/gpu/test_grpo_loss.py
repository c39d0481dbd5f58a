"""Policy losses on a GPU: no synchronisation, memory, many rows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from liger_trainer.kernels.parity.grpo_loss import LOSS_TYPES, grpo_loss

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture
def _no_synchronisation() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def _case(batch: int, length: int, vocab: int) -> tuple[torch.Tensor, ...]:
    logits = torch.randn(batch, length + 1, vocab, device="cuda", dtype=torch.bfloat16)
    ids = torch.randint(0, vocab, (batch, length), device="cuda")
    mask = (torch.arange(length, device="cuda") < torch.linspace(1, length, batch, device="cuda").unsqueeze(-1)).long()
    return logits.requires_grad_(), ids, torch.randn(batch, device="cuda"), mask


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.usefixtures("_no_synchronisation")
def test_nothing_synchronises(loss_type: str) -> None:
    logits, ids, advantages, mask = _case(4, 16, 1000)
    other = -torch.rand(4, 16, device="cuda")

    def step() -> None:
        grpo_loss(logits, ids, advantages, mask, other, other, beta=0.1, loss_type=loss_type).loss.backward()

    step()  # compiles the kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    step()


def test_inplace_backward_allocates_no_second_logits() -> None:
    leaf, ids, advantages, mask = _case(4, 511, 128256)
    size = 2 * leaf.numel()
    for inplace, allowed in ((False, 1), (True, 0)):
        logits = leaf * 1.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = grpo_loss(logits, ids, advantages, mask, inplace_backward=inplace).loss
        torch.autograd.grad(loss, logits)
        assert torch.cuda.max_memory_allocated() - before <= allowed * size + 2 * MIB
        del logits, loss


def test_more_rows_than_a_grid_axis_holds() -> None:
    logits, ids, advantages, _ = _case(2, 70000, 64)
    result = grpo_loss(logits, ids, advantages)
    exact = grpo_loss(logits.detach().double().requires_grad_(), ids, advantages)
    torch.testing.assert_close(result.log_probs.double(), exact.log_probs, atol=1e-4, rtol=1e-4)
    (gradient,) = torch.autograd.grad(result.loss, logits)
    assert gradient[:, -2].any()
    assert not gradient[:, -1].any()
