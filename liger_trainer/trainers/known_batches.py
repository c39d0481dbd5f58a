"""What the collator reads of a batch while that is on the CPU, so that a training step need not wait for the device.

The collator adds it to the batch, and the trainer takes it out when it gets the batch. It holds for the very tensors
that were read, as long as nobody writes to them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from liger_trainer.attention.known_rows import Bounds, bounds_of, padding_known
from liger_trainer.head.lm_head import version_of
from liger_trainer.trainers.labelled_bound import CountOnDevice, labels_of, most_labels

_KEY = "liger_trainer_facts"


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was read of a batch.

    Args:
        labels: How many labels it has, at most, for one forward; None if it has no tensor of labels.
        bounds: Of the rows of its attention mask; None if it has none, or one with holes.
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


_Version = tuple[torch.Tensor, int | None]


class KnownBatches:
    """The facts of the micro-batches of a step."""

    def __init__(self) -> None:
        self._labels: list[tuple[dict[str, _Version], int]] = []
        self._masks: list[tuple[_Version, Bounds]] = []

    def take(self, batches: Sequence[Any]) -> None:
        """Takes the facts of a step out of its `batches`, in place."""
        self._labels, self._masks = [], []
        for batch in batches:
            if not isinstance(batch, MutableMapping) or _KEY not in batch:
                continue
            facts = batch.pop(_KEY)
            if facts.labels is not None:
                self._labels.append((_versions(labels_of(batch)), facts.labels))
            if facts.bounds is not None:
                self._masks.append((_version(batch["attention_mask"]), facts.bounds))

    def labels(self, inputs: Any) -> Callable[[], int] | None:
        """A function that returns the most labels of a loss of `inputs`, without waiting if the host knows it.

        None if they have no labels.
        """
        labels = labels_of(inputs) if isinstance(inputs, Mapping) else {}
        if not labels:
            return None
        versions = _versions(labels)
        for read, count in self._labels:
            if read.keys() == versions.keys() and all(_same(read[name], versions[name]) for name in read):
                return lambda: count
        return CountOnDevice(most_labels(labels))

    def padding(self, inputs: Any) -> contextlib.AbstractContextManager[None]:
        """Tells the models inside how the rows of `inputs` are padded, if the host knows it."""
        mask = _mask_of(inputs) if isinstance(inputs, Mapping) else None
        if mask is not None:
            for read, bounds in self._masks:
                if _same(read, _version(mask)):
                    return padding_known(mask, bounds)
        return contextlib.nullcontext()


def _mask_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
    mask = batch.get("attention_mask")
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.numel() else None


def _versions(tensors: Mapping[str, torch.Tensor]) -> dict[str, _Version]:
    return {name: _version(tensor) for name, tensor in tensors.items()}


def _version(tensor: torch.Tensor) -> _Version:
    return tensor, version_of(tensor)


def _same(read: _Version, now: _Version) -> bool:
    return read[0] is now[0] and read[1] == now[1]
