"""Deferred logits as a patched head makes them, and the comparison with what they stand for."""

from __future__ import annotations

import copy

import torch
from torch import nn

from liger_trainer.head import DeferredLogits
from liger_trainer.head.forward import make_head_forward
from liger_trainer.head.step import Forward
from liger_trainer.patching.binding import bind_forward
from tests.steps import step_with

B, S, H, V = 2, 5, 6, 11
MASK = torch.arange(B * S).view(B, S) % 3 == 0

CHAINS = {
    "plain": lambda x: x.view(-1, V),
    "float": lambda x: x.float().view(-1, V),
    "scale": lambda x: (x * 0.5).view(-1, V).float(),
    "tensor scale": lambda x: (x / torch.tensor(4.0)).view(-1, V),
    "soft-cap": lambda x: (torch.tanh(x / 2.0) * 2.0).view(-1, V),
    "scale and soft-cap": lambda x: (torch.tanh(x * 1.5 / 2.0) * 2.0).view(-1, V),
    "in place": lambda x: x.mul_(1.5).view(-1, V),
    "shifted": lambda x: x[..., :-1, :].contiguous().view(-1, V),
    "masked": lambda x: x[MASK],
}


def defer(head: nn.Linear, hidden: torch.Tensor, fused: bool = True) -> DeferredLogits:
    patched = copy.copy(head)
    patched.__dict__ = {**head.__dict__}
    bind_forward(patched, make_head_forward(fused, 2**20))
    with step_with(forward=Forward(has_labels=True)):
        logits = patched(hidden)
    assert type(logits) is DeferredLogits
    return logits


def gradients(value: torch.Tensor, head: nn.Linear, hidden: torch.Tensor) -> list[torch.Tensor | None]:
    weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view(value.shape)
    return list(torch.autograd.grad((value * weights).sum(), [hidden, *head.parameters()], allow_unused=True))


def assert_equal(ours, native, head, hidden, tolerance=1e-6):
    assert ours.shape == native.shape
    assert ours.dtype == native.dtype
    torch.testing.assert_close(ours, native, rtol=tolerance, atol=tolerance)
    if native.requires_grad:
        for mine, theirs in zip(gradients(ours, head, hidden), gradients(native, head, hidden)):
            size = 1.0 + theirs.abs().max().item()  # about what is summed: an element may be next to nothing
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * size)
    else:
        assert not ours.requires_grad


def real(x):
    """`x` as ordinary logits."""
    return x.build() if isinstance(x, DeferredLogits) else x
