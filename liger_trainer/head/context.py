"""Context that a model's forward gives its head, and that a training step gives the loss."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from liger_trainer.context_variables import set_to
from liger_trainer.head.lm_head import output_embedding

TokenObserver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes what a loss of deferred logits has counted, three 0-d tensors: the sum of the cross entropies of the tokens,
how many of their labels are the most likely token, and how many tokens have a label."""


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """The model's forward around a call of the head.

    Args:
        has_labels: Whether the loss is computed inside this forward.
        num_items: The `num_items_in_batch` that the model's loss divides its sum by.
        read_later: Whether the logits are read after this forward too, where a sharded weight is not whole any more.
    """

    has_labels: bool
    num_items: int | torch.Tensor | None = None
    read_later: bool = False


def context_of(
    model: Any, has_labels: bool, num_items: int | torch.Tensor | None = None, read_later: bool = False
) -> ForwardContext | None:
    """The context of a forward of `model`; None where its head must not defer the logits.

    That is where FSDP1 has the head, or a part of it, in a unit of its own, whose weight is freed after its forward.
    """
    head = output_embedding(model)
    kinds = {kind for module in head.modules() for kind in type(module).__mro__}  # subclasses too, without an import
    if any(kind.__name__ == "FullyShardedDataParallel" for kind in kinds):
        return None
    return ForwardContext(has_labels, num_items, read_later)


# Context variables, so that threads and nested forwards (such as a reference model's) do not share them.
_forward: ContextVar[ForwardContext | None] = ContextVar("liger_trainer_forward", default=None)
_loss_follows: ContextVar[bool] = ContextVar("liger_trainer_loss_follows", default=False)
_read_later: ContextVar[bool] = ContextVar("liger_trainer_read_later", default=False)
_observer: ContextVar[TokenObserver | None] = ContextVar("liger_trainer_observer", default=None)
_expected: ContextVar[float | torch.Tensor | None] = ContextVar("liger_trainer_expected", default=None)
_most_labelled: ContextVar[Callable[[], int] | None] = ContextVar("liger_trainer_most_labelled", default=None)


def current_forward() -> ForwardContext | None:
    """The forward that is running and lets its head defer the logits, if any."""
    return _forward.get()


def forward_context(context: ForwardContext | None) -> contextlib.AbstractContextManager[None]:
    """Makes `context` the current forward; None hides an outer one."""
    return set_to(_forward, context)


def loss_follows() -> contextlib.AbstractContextManager[None]:
    """Declares that the logits of every forward inside go into a loss before the context ends.

    For a loss of several models, which no forward can compute from its own labels: patched models then defer their
    logits as if they had labels, also in evaluation and without gradients.
    """
    return set_to(_loss_follows, True)


def does_loss_follow() -> bool:
    """Whether the current forward runs inside [`loss_follows`]."""
    return _loss_follows.get()


def logits_read_later() -> contextlib.AbstractContextManager[None]:
    """Lets the forwards inside defer logits that the caller will read, also in evaluation."""
    return set_to(_read_later, True)


def are_logits_read_later() -> bool:
    """Whether the current forward runs inside [`logits_read_later`]."""
    return _read_later.get()


def tokens_observed_by(observe: TokenObserver | None) -> contextlib.AbstractContextManager[None]:
    """Calls `observe`, or nothing, for every loss of deferred logits inside."""
    return set_to(_observer, observe)


def token_observer() -> TokenObserver | None:
    """The function of [`tokens_observed_by`], if any."""
    return _observer.get()


def expected_loss_gradient(value: float | torch.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Sets the upstream gradient that the fused losses inside should expect in their backward.

    A fused loss computes its gradients in the forward, multiplied by the expected upstream gradient. If that arrives,
    the backward does not touch them; otherwise one pass rescales them, so the result is right for any value. The value
    is the factor between the result of `F.cross_entropy` and the tensor that `backward` is called on:
    ``1 / num_items`` for a sum divided afterwards, ``1 / accumulation_steps`` for a mean. It overrides the value that
    the model's forward derives from `num_items_in_batch`.

    Args:
        value: A number, or a 0-d tensor (which is not read on the host); None for the derived value.
    """
    return set_to(_expected, value)


def expected_gradient(reduction: str) -> float | torch.Tensor | None:
    """The upstream gradient to expect for a cross entropy with `reduction` in this context; None if unknown."""
    value = _expected.get()
    if value is not None:
        return value
    context = _forward.get()
    if reduction != "sum" or context is None or context.num_items is None:
        return None
    items = context.num_items
    # With several processes the Trainer counts the items of all and multiplies the loss by the number of processes.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = float(torch.distributed.get_world_size()) if distributed else 1.0
    if isinstance(items, torch.Tensor):
        # A division, as in autograd, and not a reciprocal: the result is compared exactly with what arrives.
        return torch.full((), processes, dtype=torch.float32, device=items.device) / items.reshape(())
    return processes / items if items else None


def labelled_rows_at_most(bound: Callable[[], int] | None) -> contextlib.AbstractContextManager[None]:
    """Declares how many rows have a label, at most, in any one loss over the head inside; it then multiplies no others.

    A bound that is too low makes that loss NaN.

    Args:
        bound: Called by each loss that asks, so it may wait for a count; None if nothing is known.
    """
    return set_to(_most_labelled, bound)


def most_labelled_rows() -> int | None:
    """The bound of [`labelled_rows_at_most`] in this context; None if there is none."""
    bound = _most_labelled.get()
    return None if bound is None else bound()
