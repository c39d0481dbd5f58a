"""Whether a user computes the loss, and divides by the labels of the whole step, as the Trainer takes for granted."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch

from liger_trainer.head.computed_on_use import tree_map
from liger_trainer.head.deferred_logits import DeferredLogits, recordable
from liger_trainer.trainers.checkpoints.run_state import random_numbers, set_random_numbers
from liger_trainer.trainers.checks.copied_function import copied_function
from liger_trainer.trainers.step import process_scale

logger = logging.getLogger("liger_trainer")

_TOLERANCE = 0.05
"""How far from a half the loss with twice the count may be, relative to it: terms that are means of their own."""


def computes_loss_in_subclass(trainer: Any) -> bool:
    """Whether a subclass of the user's computes the loss of TRL's `trainer`, which may score any tokens."""
    known = tuple(f"{library}." for library in ("liger_trainer", "trl", "transformers"))
    users = (kind for kind in type(trainer).__mro__ if not kind.__module__.startswith(known))
    return any("_compute_loss" in vars(kind) for kind in users)


class UsersLoss:
    """Looks once at the function: with twice the count, its loss has to be half as large.

    If it is not, such as for a mean over the labels of the micro-batch, the gradients of a step are too large by the
    number of its micro-batches.
    """

    def __init__(self) -> None:
        self._looked = False

    @contextlib.contextmanager
    def looked_at(self, trainer: Any, num_items: torch.Tensor | int | None) -> Iterator[None]:
        """Around the loss of a micro-batch of `num_items` labels in the whole step."""
        function = trainer.compute_loss_func
        looks = not self._looked and callable(function) and trainer.model.training and num_items is not None
        if not looks or trainer.loss_is_scaled_for_ga is not None:  # set by a user who says who divides
            yield
            return
        assert num_items is not None
        parts = getattr(trainer, "current_gradient_accumulation_steps", 1) * process_scale(trainer, num_items)
        if parts == 1:  # where a mean is right
            yield
            return
        self._looked = True
        copy, says = copied_function(function), trainer.is_world_process_zero()
        if copy is None:
            if says:
                logger.warning(
                    "`compute_loss_func` holds what cannot be copied, so it has not been tried with another "
                    "`num_items_in_batch`. The Trainer adds up the losses of a step: the summed loss of the labels has "
                    "to be divided by it. (Said once.)"
                )
            yield
            return
        trainer.compute_loss_func = _compared(function, copy, parts, says)
        try:
            yield
        finally:
            trainer.compute_loss_func = function


def _compared(function: Callable[..., Any], copy: Callable[..., Any], parts: int, says: bool) -> Callable[..., Any]:
    """`function`, whose `copy` also computes the loss with twice the count, and `says` so if it is not half."""

    def compute_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        half = _without_a_trace(copy, outputs, labels, 2 * num_items_in_batch)
        loss = function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if says and half is not None and isinstance(loss, torch.Tensor):
            whole = float(loss.detach())
            if abs(2 * half - whole) > _TOLERANCE * abs(whole):
                logger.warning(
                    "`compute_loss_func` returns %.4g, and %.4g with twice the `num_items_in_batch`, where half is "
                    "expected. The Trainer adds up the losses of a step: where each is a mean over its micro-batch, "
                    "the gradients are %s times too large. Divide the summed loss of the labels by "
                    "`num_items_in_batch`. (Said once.)",
                    *(whole, half, parts),
                )
        return loss

    return compute_loss


def _without_a_trace(function: Callable[..., Any], outputs: Any, labels: Any, num_items: Any) -> float | None:
    """The loss of copies, with the random numbers that the next call gets too; None if it cannot be computed."""
    numbers = random_numbers()
    device = next((t.device for t in (labels, num_items) if isinstance(t, torch.Tensor) and t.is_cuda), None)
    try:
        with torch.no_grad(), torch.random.fork_rng([] if device is None else [device]):
            return float(function(tree_map(_copy, outputs), _copy(labels), num_items_in_batch=num_items))
    except Exception:  # the call that counts raises it again, or works on what was not copied
        return None
    finally:
        set_random_numbers(numbers)


def _copy(value: Any) -> Any:
    if isinstance(value, DeferredLogits):
        deferred = recordable(value)
        return value.build().detach().clone() if deferred is None else deferred.derive(deferred.meta, detached=True)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
