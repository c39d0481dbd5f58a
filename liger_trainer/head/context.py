"""What a model's forward tells its head, and what a training step tells the loss."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """The model forward that the head is called in.

    Args:
        has_labels: Whether the loss is computed inside this forward.
        num_items: The `num_items_in_batch` that the model's loss divides its sum by.
    """

    has_labels: bool
    num_items: int | torch.Tensor | None = None


def context_of(model: Any, has_labels: bool, num_items: int | torch.Tensor | None = None) -> ForwardContext | None:
    """The context of a forward of `model`; None where its head may not defer.

    That is FSDP1 with the head, or a part of it, in a unit of its own: its weight is gone once that has run.
    """
    head = model.get_output_embeddings()
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in head.modules()):
        return None
    return ForwardContext(has_labels, num_items)


# Context variables, so that neither threads nor nested forwards (of a reference model, say) see each other's.
_forward: ContextVar[ForwardContext | None] = ContextVar("liger_trainer_forward", default=None)
_loss_follows: ContextVar[bool] = ContextVar("liger_trainer_loss_follows", default=False)
_expected: ContextVar[float | torch.Tensor | None] = ContextVar("liger_trainer_expected", default=None)


def current_forward() -> ForwardContext | None:
    """The forward that lets its head defer the logits; None outside of one."""
    return _forward.get()


@contextlib.contextmanager
def forward_context(context: ForwardContext | None) -> Iterator[None]:
    """Makes `context` the current forward; None hides an enclosing one."""
    token = _forward.set(context)
    try:
        yield
    finally:
        _forward.reset(token)


@contextlib.contextmanager
def loss_follows() -> Iterator[None]:
    """Says that the logits of every forward inside go into a loss, before this ends, as if it had been given labels.

    For a loss of several models, which no forward can compute from its own labels: patched models defer their logits in
    evaluation and without gradients too.
    """
    token = _loss_follows.set(True)
    try:
        yield
    finally:
        _loss_follows.reset(token)


def does_loss_follow() -> bool:
    """Whether the code around the current forward is in a [`loss_follows`]."""
    return _loss_follows.get()


@contextlib.contextmanager
def expected_loss_gradient(value: float | torch.Tensor | None) -> Iterator[None]:
    """Tells the fused losses inside which upstream gradient their backward will get.

    The fused loss computes its gradients in the forward, already multiplied by the gradient expected from above. Where
    that is what comes, backward does not touch them; where it is not, one pass rescales them, so that the result is
    right for any value. The value is the factor between `F.cross_entropy`'s result and the tensor that `backward` is
    called on: ``1 / num_items`` for a sum divided afterwards, ``1 / accumulation_steps`` for a mean. It replaces what
    the model's forward derives from `num_items_in_batch`.

    Args:
        value: A number, or a 0-d tensor (which is not read on the host); None to go back to the derived value.
    """
    token = _expected.set(value)
    try:
        yield
    finally:
        _expected.reset(token)


def expected_gradient(reduction: str) -> float | torch.Tensor | None:
    """The upstream gradient to expect for a cross entropy with `reduction` called now; None when nothing is known."""
    value = _expected.get()
    if value is not None:
        return value
    context = _forward.get()
    if reduction != "sum" or context is None or context.num_items is None:
        return None
    items = context.num_items
    # With several processes the Trainer counts the items of all of them and multiplies the loss by their number.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = float(torch.distributed.get_world_size()) if distributed else 1.0
    if isinstance(items, torch.Tensor):
        # A division, as autograd's own, and not a reciprocal: the comparison with what arrives is exact.
        return torch.full((), processes, dtype=torch.float32, device=items.device) / items.reshape(())
    return processes / items if items else None
