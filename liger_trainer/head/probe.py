"""The proof before patching: the deferring head and ``nn.Linear`` on the same small random input."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from liger_trainer.head.context import ForwardContext, expected_loss_gradient, forward_context
from liger_trainer.patching.binding import bind_forward

TOLERANCE = 5e-3
"""Largest relative difference allowed: fp32 gives about 1e-6, TensorFloat-32 (where it is on) about 1e-3."""

_BATCH, _LENGTH, _HIDDEN, _VOCAB, _IGNORED = 2, 8, 32, 48, -100


def probe_head(forward: Callable, has_bias: bool, device: torch.device) -> float:
    """Runs a stand-in head with `forward` and without it, loss and gradients.

    Args:
        forward: The head's forward to prove.
        has_bias: Whether the model's head has a bias.
        device: Where the model's head is.

    Returns:
        The largest difference of the loss and the gradients of hidden states, weight and bias, each relative to the
        largest native value.
    """
    generator = torch.Generator().manual_seed(0)  # of its own: the training's random numbers stay what they were
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device)  # noqa: E731
    weight, bias, hidden = draw(_VOCAB, _HIDDEN) / 4, draw(_VOCAB), draw(_BATCH, _LENGTH, _HIDDEN)
    target = torch.randint(0, _VOCAB, (_BATCH * _LENGTH,), generator=generator)
    target[:3] = _IGNORED
    target = target.to(device)

    def results(patched: bool) -> list[torch.Tensor]:
        head = nn.utils.skip_init(nn.Linear, _HIDDEN, _VOCAB, bias=has_bias, device=device, dtype=torch.float32)
        with torch.no_grad():
            head.weight.copy_(weight)
            if has_bias:
                head.bias.copy_(bias)
        if patched:
            bind_forward(head, forward)
        states = hidden.clone().requires_grad_()
        with forward_context(ForwardContext(has_labels=True)), expected_loss_gradient(None):
            logits = head(states).float().view(-1, _VOCAB)
            loss = F.cross_entropy(logits, target, ignore_index=_IGNORED)
        loss.backward()
        return [loss.detach(), states.grad, *(parameter.grad for parameter in head.parameters())]  # type: ignore[list-item]

    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        pairs = list(zip(results(patched=False), results(patched=True), strict=True))
    return max(float((ours - native).abs().max() / native.abs().max()) for native, ours in pairs)
