"""Metrics of a step that the host reads at the next log, and not after each micro-batch.

TRL's trainers for SFT and for rewards ask the device for some numbers after each forward, and so the host waits until
the forward has run, and the device then waits for the host. Those for DPO and KTO also choose tokens by a mask, and
those for GRPO and RLOO look for NaN first, for which the host waits all the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_MOST = 256  # micro-batches whose numbers wait to be read, each in a block of the device's memory


class DeferredNumber(torch.Tensor):
    """A number on the device, 0-d, which code that wants a Python number takes as one.

    What that code divides by, or compares with 0, is a count: it is said to be above 0 without a look at it, and a
    number divided by a count of 0 is 0, as in the code that looks.
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
    """Has a trainer of TRL note its metrics on the device.

    Args:
        trainer: The trainer.
        gathering: The methods of accelerate by which it gathers for its metrics, and for nothing else.
    """

    def __init__(self, trainer: Any, gathering: Sequence[str] = ("gather_for_metrics",)) -> None:
        self._trainer, self._gathering = trainer, gathering
        self._waiting = 0  # micro-batches

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """In the context, what the trainer gathers for its metrics is not read."""
        accelerator = self._trainer.accelerator
        of_user = {name: vars(accelerator).get(name) for name in self._gathering}
        for name in self._gathering:
            setattr(accelerator, name, _deferring(getattr(accelerator, name)))
        try:
            yield
        finally:
            for name, own in of_user.items():
                delattr(accelerator, name) if own is None else setattr(accelerator, name, own)
        self._waiting += 1
        if self._waiting >= _MOST:
            self.read()

    def read(self) -> None:
        """Reads what was noted, all at once."""
        total = [self._trainer._total_train_tokens]
        # Those of evaluations too: the number of tokens there is that of the training.
        lists = [*(each for of_mode in self._trainer._metrics.values() for each in of_mode.values()), total]
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


def _deferring(gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(*args: Any, **kwargs: Any) -> Any:
        found = gather(*args, **kwargs)
        return found.detach().as_subclass(DeferredNumber) if type(found) is torch.Tensor else found

    return gathered


class DeferredMetricsMixin:
    """Comes before a trainer of TRL whose `compute_loss` notes its metrics in `_deferred`, and reads them in time."""

    _deferred: DeferredMetrics | None = None

    def log(self, *args: Any, **kwargs: Any) -> None:
        """Logs; see [`~transformers.Trainer.log`]."""
        if self._deferred is not None:
            self._deferred.read()
        super().log(*args, **kwargs)  # type: ignore[misc]

    def _save_rng_state(self, *args: Any, **kwargs: Any) -> None:
        if self._deferred is not None:
            self._deferred.read()  # with the random numbers, a checkpoint holds the metrics since the last log
        super()._save_rng_state(*args, **kwargs)  # type: ignore[misc]


def may_defer(trainer: Any) -> bool:
    """Whether a trainer's metrics may wait: not where reading them does not wait, or code of the user may see them."""
    own = trainer._has_users_loss or callable(trainer.compute_loss_func)
    return trainer.args.device.type != "cpu" and not own
