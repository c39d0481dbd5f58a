"""What is known of the training step that runs, for the code on the far side of a model's forward.

A trainer knows how many labels a batch has, and which gradient its loss will get. Masks, heads and losses need to know.
Between the two is a forward of transformers, which passes nothing on. So a `Step` holds all that is known, in one
context variable. It is frozen. A reference, a teacher or a packed row, of which other things are known, runs under a
copy with other fields:

    with running(replace(current_step(), labelled=None)):
        outputs = teacher(**inputs)

A new thread begins with the default `Step`; a nested forward sees that of its caller.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar

import torch
from torch.nn import functional as F

from liger_trainer.kernels.attention.plan import AttentionPlan
from liger_trainer.kernels.documents import Documents

Bounds = Sequence[tuple[int, int]]
"""The first token of each row, and the one after the last; (0, 0) for a row of padding."""

PlanOf = Callable[[int, int], AttentionPlan]
"""Returns the attention plan for a window and a chunk size, both in tokens; 0 stands for no window or no chunks."""

TokenObserver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Takes what a loss of deferred logits has counted, three 0-d tensors: the sum of the cross entropies of the tokens,
how many of their labels are the most likely token, and how many tokens have a label."""


@dataclasses.dataclass(frozen=True, eq=False)
class Padding:
    """A padding mask that was read on the host.

    Args:
        mask: The mask, `(B, S)`, on the device. What was read holds for this tensor only, not for a copy.
        version: How often the mask had been changed in place when it was read.
        bounds: The tokens of each row.
    """

    mask: torch.Tensor
    version: int | None
    bounds: Bounds


Runs = Sequence[tuple[int, int]]
"""The first token of each run of tokens in the flattened batch, and the one after its last, in order."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReadLabels:
    """Labels that were read on the host.

    Args:
        tensor: The labels, on the device. What was read holds for this tensor only, not for a copy.
        version: How often the tensor had been changed in place when it was read.
        scored: The tokens whose logits the labels are for.
    """

    tensor: torch.Tensor
    version: int | None
    scored: Runs


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of a forward that is given no position ids.

    Args:
        bounds: The tokens of each row, if there is a padding mask; None if all rows are whole.
    """

    bounds: Bounds | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One of the two times that a forward runs with a checkpoint around the whole model.

    Args:
        again: Whether this is the second time, in the backward. The first has no backward, so its layers keep nothing.
    """

    again: bool


@dataclasses.dataclass(frozen=True)
class Forward:
    """What a model's forward tells the head that it calls.

    Args:
        has_labels: Whether the loss is computed inside this forward.
        num_items: The `num_items_in_batch` that the model's loss divides its sum by.
        read_later: Whether the logits are read after this forward too, when a sharded weight is split again.
        labels: The labels without which nothing reads a token's logits; None if any logits may be read.
    """

    has_labels: bool
    num_items: int | torch.Tensor | None = None
    read_later: bool = False
    labels: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What is known where code of a step runs; by default, nothing.

    Set by the trainer, or by an evaluation:

    Args:
        labelled: Returns an upper bound of the number of rows with a label in any one loss over the head. The head then
            multiplies no other rows. Each loss calls the function, which may wait for a count. A bound that is too low
            makes the loss NaN.
        padding: The padding mask of the batch.
        labels: The labels of the batch, if the host has read them.
        expected_gradient: The upstream gradient that fused losses should expect in their backward: the factor between
            the result of `F.cross_entropy` and the tensor that `backward` is called on, ``1 / num_items`` for a sum
            divided afterwards, ``1 / accumulation_steps`` for a mean. A number, or a 0-d tensor, which is not read on
            the host. If another gradient arrives, one pass rescales what was computed, so the result is right for any
            value. If None, the gradient is derived from the `num_items_in_batch` of the model's forward.
        observer: Called for every loss of deferred logits.
        z_losses: A list to which every forward that computes a load-balancing loss with a gradient appends its router's
            z-loss, a scalar with a gradient. A forward that is compiled as one graph appends nothing.
        loss_follows: Whether the logits of every forward go into a loss before the step ends. A loss of several models
            sets it, as no forward can compute that loss from its own labels. Patched models then defer their logits as
            if they had labels, also in evaluation and without gradients.
        read_later: Whether the forwards of an evaluation may defer logits that the caller will read.
        fills_below: Packed rows of fewer tokens are filled up, so that few shapes occur; 0 for none.

    Set by the forward that runs:

    Args:
        forward: The forward that lets its head defer the logits.
        rows: The rows that its masks are for.
        plan_of: Makes the attention plans of a packed row; None for any other forward.
        documents: Makes the documents of the rows, for layers that mix tokens without attention, and for the masks of
            models with such layers; None for any other forward, and where each row is one.
        computation: First or second time, for a forward that runs twice; None for a forward that runs once.
        generates: Whether the forward computes the next token of a generation: with a cache, and without gradients.
        kept: A list to which a model whose last layers run on some tokens alone appends the places of these (int64
            (K,), in the flattened batch); None where they run on all.
    """

    labelled: Callable[[], int] | None = None
    padding: Padding | None = None
    labels: ReadLabels | None = None
    expected_gradient: float | torch.Tensor | None = None
    observer: TokenObserver | None = None
    z_losses: list[torch.Tensor] | None = None
    loss_follows: bool = False
    read_later: bool = False
    fills_below: int = 0
    forward: Forward | None = None
    rows: Rows | None = None
    plan_of: PlanOf | None = None
    documents: Callable[[], Documents] | None = None
    computation: Pass | None = None
    generates: bool = False
    kept: list[torch.Tensor] | None = None


_step: ContextVar[Step] = ContextVar("liger_trainer_step", default=Step())  # noqa: B039  (frozen)

current_step = _step.get
"""Returns the [`Step`] that the calling code runs in."""


@contextlib.contextmanager
def running(step: Step) -> Iterator[None]:
    """A context whose code runs in `step`."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def expected_gradient(reduction: str) -> float | torch.Tensor | None:
    """The upstream gradient to expect for a cross entropy with this `reduction`; None if it is not known."""
    step = _step.get()
    if step.expected_gradient is not None:
        return step.expected_gradient
    if reduction != "sum" or step.forward is None or step.forward.num_items is None:
        return None
    items = step.forward.num_items
    # With several processes, the Trainer counts the items on all of them and multiplies the loss by their number.
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    processes = float(torch.distributed.get_world_size()) if distributed else 1.0
    if isinstance(items, torch.Tensor):
        # A division, as in autograd, and not a reciprocal: the result is compared exactly with what arrives.
        return torch.full((), processes, dtype=torch.float32, device=items.device) / items.reshape(())
    return processes / items if items else None


def bounds_of(mask: torch.Tensor) -> Bounds | None:
    """Reads a padding mask `(B, S)` on the host; None if a masked token stands between two that are not masked."""
    seen = mask.bool().byte()
    after = mask.shape[1] - seen.flip(-1).argmax(-1)
    rows = torch.stack([seen.argmax(-1), after, seen.sum(-1)], -1).tolist()
    if any(count and end - start != count for start, end, count in rows):
        return None
    return [(start, end) if count else (0, 0) for start, end, count in rows]


def runs_of(mask: torch.Tensor) -> Runs:
    """Reads on the host where a mask of bools, of any shape, is true."""
    changes = F.pad(mask.flatten().byte(), (1, 1)).diff().nonzero()
    return [(first, behind) for first, behind in changes.view(-1, 2).tolist()]
