"""How many rows of a micro-batch have a label at most, for a head that multiplies no others (`head/labelled_rows.py`).

The collator counts labels while they are on the CPU (`known_batches.py`). Any others, such as those of completions that
the policy has just written, are counted on the device. The head then waits for that count, which comes before the
forward in the device's queue, while the device runs the forward.

Shifting and masking leave labels out and add none, so the number bounds every loss of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from liger_trainer.kernels.head.loss_options import IGNORE_INDEX

_NOTHING = {"labels": IGNORE_INDEX, "shift_labels": IGNORE_INDEX, "completion_mask": 0, "KL_completion_mask": 0}
"""What a trainer takes labels from, each for a forward of its own, and the value where there is none."""


def labels_of(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What has a label for each token in `batch`, by name."""
    found = {name: batch[name] for name in _NOTHING if isinstance(batch.get(name), torch.Tensor)}
    return {name: tensor for name, tensor in found.items() if tensor.dim() > 1 and not tensor.is_floating_point()}


def most_labels(labels: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The labels of the forward that has most, of those that [`labels_of`] found; 0-d."""
    return torch.stack([tensor.ne(_NOTHING[name]).sum() for name, tensor in labels.items()]).amax()


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
