"""What a trainer knows of a micro-batch before its loss: its labels, its padding, and how its loss is scaled.

The collator reads a batch while that is on the CPU and adds [`Facts`]; the trainer takes them out when it gets the
batch. They hold for the very tensors that were read, as long as nobody writes to them. Labels that no collator has
seen, such as those of completions that the policy has just written, are counted on the device. The head then waits for
that count, which comes before the forward in the device's queue, while the device runs the forward.

Shifting and masking leave labels out and add none, so the number of labels bounds every loss of the micro-batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from liger_trainer.callbacks.labelled_share import NO_LABEL
from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import LOSS_SCALE
from liger_trainer.head.lm_head import version_of
from liger_trainer.head.step import Bounds, Padding, Step, bounds_of

require(LOSS_SCALE)

_KEY = "liger_trainer_facts"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was read of a batch.

    Args:
        labels: How many labels it has, at most, for one forward; None if it has no tensor of labels.
        bounds: The tokens of the rows of its attention mask; None if it has none, or one with holes.
    """

    labels: int | None
    bounds: Bounds | None


def add_facts(batch: Any) -> None:
    """Adds [`Facts`] to the `batch` of a collator, if it is a dictionary of tensors on the CPU that has any."""
    if not (type(batch) is dict or isinstance(batch, UserDict)):
        return
    labels, mask = labels_of(batch), _mask_of(batch)
    tensors = [*labels.values(), *([] if mask is None else [mask])]
    if tensors and all(tensor.device.type == "cpu" for tensor in tensors):
        count = int(most_labels(labels)) if labels else None
        batch[_KEY] = Facts(count, None if mask is None else bounds_of(mask))


def discard_facts(batch: Any) -> None:
    """Takes the facts out of `batch`, if it has any."""
    if isinstance(batch, MutableMapping):
        batch.pop(_KEY, None)


class KnownBatches:
    """The facts of the micro-batches of a step."""

    def __init__(self) -> None:
        self._labels: list[tuple[dict[str, torch.Tensor], list[int | None], int]] = []  # labels, versions, count
        self._paddings: list[Padding] = []

    def take(self, batches: Sequence[Any]) -> None:
        """Takes the facts of a step out of its `batches`, in place."""
        self._labels, self._paddings = [], []
        for batch in batches:
            if not isinstance(batch, MutableMapping) or _KEY not in batch:
                continue
            facts = batch.pop(_KEY)
            if facts.labels is not None:
                labels = labels_of(batch)
                self._labels.append((labels, [version_of(tensor) for tensor in labels.values()], facts.labels))
            if facts.bounds is not None:
                mask = batch["attention_mask"]
                self._paddings.append(Padding(mask, version_of(mask), facts.bounds))

    def added_to(self, step: Step, inputs: Any, count_labels: bool) -> Step:
        """`step` with how the rows of `inputs` are padded, if the host knows it, and with a count of their labels.

        The count is a function that returns the most labels of a loss of `inputs`, without waiting if the host knows
        it; it is left out if they have no labels, or without `count_labels`.
        """
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        for padding in self._paddings:
            if padding.mask is mask and padding.version == version_of(mask):
                step = replace(step, padding=padding)
                break
        found = labels_of(inputs) if count_labels else {}
        for read, versions, count in self._labels if found else ():
            same = read.keys() == found.keys() and all(read[name] is found[name] for name in read)
            if same and versions == [version_of(tensor) for tensor in read.values()]:
                return replace(step, labelled=functools.partial(int, count))
        return replace(step, labelled=count_later(most_labels(found))) if found else step


def _mask_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
    mask = batch.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.numel() else None


def labels_of(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of `batch` that have a label for each token, by name; none if it is no mapping."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(batch, Mapping):
        for name in NO_LABEL:
            tensor = batch.get(name)
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1 and not tensor.is_floating_point():
                found[name] = tensor
    return found


def most_labels(labels: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The labels of the forward that has most, of those that [`labels_of`] found; 0-d."""
    counts = []
    for name, tensor in labels.items():
        counts.append(tensor.ne(NO_LABEL[name]).sum())
    return torch.stack(counts).amax()


def labels_of_parts(mask: torch.Tensor, rows: int | None) -> torch.Tensor:
    """The most labels of several forwards, each of `rows` rows of `mask` `(B, S)`, not 0 where there is a label; 0-d.

    By default one forward takes them all.
    """
    counts = mask.ne(0).sum(-1)
    return torch.stack([part.sum() for part in counts.split(rows or len(counts))]).amax()


def count_later(count: torch.Tensor) -> Callable[[], int]:
    """A function that returns a 0-d `count`, which is copied to the host while the device works."""
    return CountOnDevice(count) if count.is_cuda else count.item  # type: ignore[return-value]


class CountOnDevice:
    """A count on its way to the host; the first call waits for it.

    Args:
        count: 0-d, of integers.
        event: Creates the event to wait for.
    """

    def __init__(self, count: torch.Tensor, event: Callable[[], Any] = torch.cuda.Event) -> None:
        self._count = torch.empty((), dtype=count.dtype, pin_memory=count.is_cuda)
        self._count.copy_(count, non_blocking=True)
        self._ready: Any = event()
        self._ready.record()

    def __call__(self) -> int:
        """The count."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None
        return int(self._count)


def loss_divisor(trainer: Any, num_items: torch.Tensor | int | None) -> int:
    """The divisor for a term of one micro-batch: the accumulation steps, or 1 if the Trainer divides by them."""
    scaled = trainer.loss_is_scaled_for_ga
    if scaled is None:
        by_items = trainer.model_accepts_loss_kwargs and num_items is not None
        scaled = by_items or trainer.compute_loss_func is not None
    return getattr(trainer, "current_gradient_accumulation_steps", 1) if scaled else 1


def process_scale(trainer: Any, num_items: torch.Tensor | int | None) -> int:
    """The factor by which the Trainer multiplies a loss that was divided by the labels of all processes.

    Processes that share their batches (tensor parallelism) count as one.
    """
    if num_items is None or not trainer.args.average_tokens_across_devices:
        return 1
    return trainer.accelerator.num_processes // trainer.get_tp_size()
