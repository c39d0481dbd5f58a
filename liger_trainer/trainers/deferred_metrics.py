"""Metrics of a step that the host reads at the next log, and not after each micro-batch.

TRL's trainer for SFT asks the device for three numbers after each forward, and so the host waits until the forward has
run, and the device then waits for the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from liger_trainer.compat.private import available
from liger_trainer.compat.trl import COUNTED_METRICS

_MOST = 256  # micro-batches whose numbers wait to be read, each in a block of the device's memory


class DeferredNumber(torch.Tensor):
    """A number on the device, 0-d, which code that wants a Python number takes as one.

    It is a count, or the share of a count: it is said to be above 0 without a look at it, and divided by a count of 0
    it is 0, as in the code that looks.
    """

    def item(self) -> Any:
        """The number, still on the device."""
        return self

    def __gt__(self, other: Any) -> Any:
        return True if type(other) is int and other == 0 else super().__gt__(other)

    def __truediv__(self, other: Any) -> Any:
        if not isinstance(other, DeferredNumber):
            return super().__truediv__(other)
        return torch.where(other == 0, 0, super().__truediv__(other))


class DeferredMetrics:
    """Has TRL's trainer for SFT note its metrics on the device.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._waiting = 0  # micro-batches

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """In the context, what the trainer gathers for its metrics is not read."""
        accelerator = self._trainer.accelerator
        gather, of_user = accelerator.gather_for_metrics, vars(accelerator).get("gather_for_metrics")

        def gathered(*args: Any, **kwargs: Any) -> Any:
            found = gather(*args, **kwargs)
            return found.detach().as_subclass(DeferredNumber) if type(found) is torch.Tensor else found

        accelerator.gather_for_metrics = gathered
        try:
            yield
        finally:
            del accelerator.gather_for_metrics
            if of_user is not None:
                accelerator.gather_for_metrics = of_user
        self._waiting += 1
        if self._waiting >= _MOST:
            self.read()

    def read(self) -> None:
        """Reads what was noted, all at once."""
        total = [self._trainer._total_train_tokens]
        lists = [*self._trainer._metrics["train"].values(), total]
        noted: dict[torch.dtype, list[tuple[list[Any], int]]] = {}  # in fp32, and counts
        for each in lists:
            for place, one in enumerate(each):
                if isinstance(one, DeferredNumber):
                    noted.setdefault(one.dtype, []).append((each, place))
        for places in noted.values():
            numbers = torch.stack([each[place] for each, place in places]).tolist()
            for (each, place), number in zip(places, numbers, strict=True):
                each[place] = number
        (self._trainer._total_train_tokens,) = total
        self._waiting = 0


def deferred_metrics(trainer: Any) -> DeferredMetrics | None:
    """What notes the metrics of a trainer for SFT; None where reading them does not wait, or code of the user may."""
    own = trainer._has_users_loss or callable(trainer.compute_loss_func)
    waits = trainer.args.device.type != "cpu"
    return DeferredMetrics(trainer) if waits and not own and available(COUNTED_METRICS) else None
