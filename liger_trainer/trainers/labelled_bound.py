"""How many rows of a micro-batch have a label at most, for a head that multiplies no others (`head/labelled_rows.py`).

The collator counts the labels while they are on the CPU and adds their number to the batch. The trainer takes it out
when it gets the batch, and uses it for a loss that is given the very tensors that were counted. Any other labels, such
as those of completions that the policy has just written, are counted on the device. The head then waits for that count,
which comes before the forward in the device's queue, while the device runs the forward.

Shifting and masking leave labels out and add none, so the number bounds every loss of the micro-batch.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from liger_trainer.head.lm_head import version_of
from liger_trainer.kernels.head.row_statistics import IGNORE_INDEX

_KEY = "liger_trainer_labelled_rows"
_NOTHING = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "completion_mask": 0, "KL_completion_mask": 0}
"""What a trainer takes labels from, each for a forward of its own, and the value where there is none."""


def add_count(batch: Any) -> None:
    """Adds the number of labels on the CPU to the `batch` of a collator, if it is a dictionary that has any."""
    if type(batch) is dict or isinstance(batch, UserDict):
        tensors = _tensors(batch)
        if tensors and all(tensor.device.type == "cpu" for tensor in tensors.values()):
            batch[_KEY] = int(_count(tensors))


def discard_count(batch: Any) -> None:
    """Takes the number of labels out of `batch`, if it has one."""
    if isinstance(batch, MutableMapping):
        batch.pop(_KEY, None)


class LabelledBounds:
    """The counts of the micro-batches of a step."""

    def __init__(self) -> None:
        self._known: list[tuple[dict[str, tuple[torch.Tensor, int | None]], int]] = []

    def take(self, batches: Sequence[Any]) -> None:
        """Takes the counts of a step out of its `batches`, in place."""
        self._known = []
        for batch in batches:
            if isinstance(batch, MutableMapping) and _KEY in batch:
                count = batch.pop(_KEY)
                self._known.append((_versions(batch), count))

    def of(self, inputs: Any) -> Callable[[], int] | None:
        """A function that returns the bound for a loss of `inputs`, without waiting if the host knows it.

        None if they have no labels.
        """
        tensors = _tensors(inputs) if isinstance(inputs, Mapping) else {}
        if not tensors:
            return None
        versions = _versions(inputs)
        for counted, count in self._known:
            if counted.keys() == versions.keys() and all(_same(counted[name], versions[name]) for name in counted):
                return lambda: count
        return CountOnDevice(_count(tensors))


class CountOnDevice:
    """A count that is copied to the host while the device works; the first call waits for the copy.

    Args:
        count: 0-d, of integers.
        event: Creates the event to wait for; by default CUDA's for a count on CUDA. Any other count is read when asked.
    """

    def __init__(self, count: torch.Tensor, event: Callable[[], Any] | None = None) -> None:
        self._ready: Any = None
        self._count = count
        event = torch.cuda.Event if event is None and count.is_cuda else event
        if event is not None:
            self._count = torch.empty((), dtype=count.dtype, pin_memory=count.is_cuda)
            self._count.copy_(count, non_blocking=True)
            self._ready = event()
            self._ready.record()

    def __call__(self) -> int:
        """The count."""
        if self._ready is not None:
            self._ready.synchronize()
            self._ready = None
        return int(self._count)


def bound_of_parts(mask: torch.Tensor, rows: int | None) -> CountOnDevice:
    """The bound of several forwards, each of which takes `rows` rows of `mask` `(B, S)`, not 0 where there is a label.

    By default one forward takes them all.
    """
    counts = mask.ne(0).sum(-1)
    return CountOnDevice(torch.stack([part.sum() for part in counts.split(rows or len(counts))]).amax())


def _tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What has a label for each token in `batch`."""
    found = {name: batch[name] for name in _NOTHING if isinstance(batch.get(name), torch.Tensor)}
    return {name: tensor for name, tensor in found.items() if tensor.dim() > 1 and not tensor.is_floating_point()}


def _count(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The labels of the forward that has most, 0-d."""
    return torch.stack([tensor.ne(_NOTHING[name]).sum() for name, tensor in tensors.items()]).amax()


def _versions(batch: Mapping[str, Any]) -> dict[str, tuple[torch.Tensor, int | None]]:
    return {name: (tensor, version_of(tensor)) for name, tensor in _tensors(batch).items()}


def _same(counted: tuple[torch.Tensor, int | None], now: tuple[torch.Tensor, int | None]) -> bool:
    return counted[0] is now[0] and counted[1] == now[1]
