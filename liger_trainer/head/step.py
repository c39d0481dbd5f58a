"""What is known of the training step that runs, for the code on the far side of a model's forward.

Who knows a batch and who needs that knowledge have a forward of transformers between them, which passes nothing on: a
trainer knows how many labels a batch has and which gradient its loss will get; masks, heads and losses ask. A `Step` is
all of it, in one context variable. It is frozen: where a reference, a teacher or a packed row is known differently, it
runs under a copy that `dataclasses.replace` has made:

    with running(replace(current_step(), labelled=None)):
        outputs = teacher(**inputs)

A context variable, so that threads and nested forwards do not share it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch

from liger_trainer.kernels.attention.plan import AttentionPlan

Bounds = Sequence[tuple[int, int]]
"""The first token of each row, and the one after the last; (0, 0) for a row of padding."""

PlanOf = Callable[[int, int], AttentionPlan]
"""The attention plan for a window and for chunks of so many tokens; 0 for none."""

TokenObserver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes what a loss of deferred logits has counted, three 0-d tensors: the sum of the cross entropies of the tokens,
how many of their labels are the most likely token, and how many tokens have a label."""


@dataclasses.dataclass(frozen=True, eq=False)
class Padding:
    """A padding mask that was read on the host.

    Args:
        mask: The tensor `(B, S)`, on the device; a forward has to be given this very one.
        version: How often it had been changed in place.
        bounds: The tokens of each row.
    """

    mask: torch.Tensor
    version: int | None
    bounds: Bounds


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a forward without position ids.

    Args:
        bounds: The tokens of rows with a padding mask; None for rows without one, which are whole.
    """

    bounds: Bounds | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One computation of a forward that is computed twice, by a checkpoint around all of it.

    Args:
        again: Whether it is the second one, in the backward. The first has no backward, so its layers keep nothing.
    """

    again: bool


@dataclasses.dataclass(frozen=True)
class Forward:
    """The forward of a model around a call of its head.

    Args:
        has_labels: Whether the loss is computed inside this forward.
        num_items: The `num_items_in_batch` that the model's loss divides its sum by.
        read_later: Whether the logits are read after this forward too, where a sharded weight is not whole any more.
    """

    has_labels: bool
    num_items: int | torch.Tensor | None = None
    read_later: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What is known where code of a step runs. Nothing is, by default.

    The trainer knows, or the evaluation:

    Args:
        labelled: Returns how many rows have a label, at most, in any one loss over the head, which then multiplies no
            others; called by each loss that asks, so it may wait for a count. A bound that is too low makes that loss
            NaN.
        padding: The padding mask of the batch.
        expected_gradient: The upstream gradient that fused losses should expect in their backward: the factor between
            the result of `F.cross_entropy` and the tensor that `backward` is called on, ``1 / num_items`` for a sum
            divided afterwards, ``1 / accumulation_steps`` for a mean. A number, or a 0-d tensor, which is not read on
            the host. If another gradient arrives, one pass rescales what was computed, so the result is right for any
            value. None for what the model's forward derives from `num_items_in_batch`.
        observer: Called for every loss of deferred logits.
        z_losses: Gets the router's z-loss, a scalar with a gradient, of every forward that computes a load-balancing
            loss with a gradient. A forward that is compiled as one graph gives none.
        loss_follows: Whether the logits of every forward go into a loss before the step ends, as for a loss of several
            models, which no forward can compute from its own labels. Patched models then defer their logits as if they
            had labels, also in evaluation and without gradients.
        read_later: Whether the forwards of an evaluation may defer logits that the caller will read.

    The forward that runs knows:

    Args:
        forward: The forward that lets its head defer the logits.
        rows: The rows that its masks are for.
        plan_of: The plans of attention, for a forward of one packed row.
        computation: Which of the two computations of a forward runs; None for a forward that is computed once.
        generates: Whether it is a step of generation: one with a cache and without gradients.
    """

    labelled: Callable[[], int] | None = None
    padding: Padding | None = None
    expected_gradient: float | torch.Tensor | None = None
    observer: TokenObserver | None = None
    z_losses: list[torch.Tensor] | None = None
    loss_follows: bool = False
    read_later: bool = False
    forward: Forward | None = None
    rows: Rows | None = None
    plan_of: PlanOf | None = None
    computation: Pass | None = None
    generates: bool = False


_step: ContextVar[Step] = ContextVar("liger_trainer_step", default=Step())  # noqa: B039  (frozen)

current_step = _step.get
"""What is known where this is called: a [`Step`]."""


@contextlib.contextmanager
def running(step: Step) -> Iterator[None]:
    """Inside, `step` is what is known."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def expected_gradient(reduction: str) -> float | torch.Tensor | None:
    """The upstream gradient to expect for a cross entropy with `reduction` here; None if unknown."""
    step = _step.get()
    if step.expected_gradient is not None:
        return step.expected_gradient
    if reduction != "sum" or step.forward is None or step.forward.num_items is None:
        return None
    items = step.forward.num_items
    # With several processes the Trainer counts the items of all and multiplies the loss by the number of processes.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = float(torch.distributed.get_world_size()) if distributed else 1.0
    if isinstance(items, torch.Tensor):
        # A division, as in autograd, and not a reciprocal: the result is compared exactly with what arrives.
        return torch.full((), processes, dtype=torch.float32, device=items.device) / items.reshape(())
    return processes / items if items else None


def bounds_of(mask: torch.Tensor) -> Bounds | None:
    """Reads a padding mask `(B, S)` on the host; None if it masks a token between two that it does not."""
    seen = mask.bool().byte()
    after = mask.shape[1] - seen.flip(-1).argmax(-1)
    rows = torch.stack([seen.argmax(-1), after, seen.sum(-1)], -1).tolist()
    if any(count and end - start != count for start, end, count in rows):
        return None
    return [(start, end) if count else (0, 0) for start, end, count in rows]
