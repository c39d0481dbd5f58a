"""Metrics of a step that the host reads at the next log, and not after each micro-batch.

TRL's trainers ask the device for five to twenty numbers after each forward, and so the host waits until the forward has
run, and the device then waits for the host.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from liger_trainer.head.on_host import plain

GATHERING = ("gather", "gather_for_metrics")
"""The methods of accelerate by which most of TRL's trainers gather for their metrics, and for nothing else."""
_MOST = 256  # micro-batches whose numbers wait to be read, each in a block of the device's memory


class DeferredNumber(torch.Tensor):
    """A number on the device, 0-d, or numbers that one is computed from.

    What code divides by, or compares with 0, is a count: it is said to be above 0 without a look at it, and a number
    divided by a count of 0 is 0, as in the code that looks. With a tensor that has a gradient it gives plain tensors,
    as for KTO's loss, which has a metric in it.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(type(each) is torch.Tensor and each.requires_grad for each in args):
            with torch._C.DisableTorchFunctionSubclass():
                args = [each.as_subclass(torch.Tensor) if isinstance(each, DeferredNumber) else each for each in args]
                return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    def item(self) -> Any:
        """The number, still on the device, which code that wants a Python number takes as one."""
        return self.as_subclass(_ReadNumber)

    def __gt__(self, other: Any) -> Any:
        return True if type(other) is int and other == 0 and not self.dim() else super().__gt__(other)

    def __truediv__(self, other: Any) -> Any:
        if not isinstance(other, DeferredNumber):
            return super().__truediv__(other)
        return torch.where(other == 0, 0, super().__truediv__(other))


class _ReadNumber(DeferredNumber):
    """A number of Python's, for code that has read it: with fractions, it is calculated with in fp64.

    Attributes:
        counts: The counts by which it was divided, or what it is calculated from.
    """

    counts: tuple[torch.Tensor, ...] = ()

    def __truediv__(self, other: Any) -> Any:
        if isinstance(other, DeferredNumber):
            return self._calculated(other, lambda a, b: torch.where(b == 0, 0.0, a.double() / b), (other,))
        return self._calculated(other, lambda a, b: a.double() / b)

    def __mul__(self, other: Any) -> Any:
        return self._calculated(other, operator.mul)

    __imul__ = __mul__  # a number of Python's does not change

    def __sub__(self, other: Any) -> Any:
        return self._calculated(other, operator.sub)

    def _calculated(self, other: Any, operation: Callable[..., Any], counts: tuple[torch.Tensor, ...] = ()) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            number = operation(_as_python(self), _as_python(other)).as_subclass(_ReadNumber)
        number.counts = (*self.counts, *getattr(other, "counts", ()), *counts)
        return number


def _as_python(number: Any) -> Any:
    if not isinstance(number, torch.Tensor):
        return number
    plain = number.as_subclass(torch.Tensor)
    return plain.double() if plain.is_floating_point() else plain


class DeferredMetrics:
    """Has a trainer of TRL note its metrics on the device.

    Args:
        trainer: The trainer.
        gathering: The methods of accelerate by which it gathers for its metrics.
        leaves_out: Whether it notes no number that would be divided by a count of 0, rather than 0.
        functions: By their names in the trainer's module, functions that stand for those of TRL's that wait.
    """

    def __init__(
        self,
        trainer: Any,
        gathering: Sequence[str] = ("gather_for_metrics",),
        leaves_out: bool = False,
        functions: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._trainer, self._gathering, self._leaves_out = trainer, gathering, leaves_out
        self._functions = functions or {}
        self._waiting = 0  # micro-batches

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """In the context, what the trainer gathers for its metrics is not read."""
        accelerator = self._trainer.accelerator
        of_user = {name: vars(accelerator).get(name) for name in self._gathering}
        for name in self._gathering:
            setattr(accelerator, name, _deferring(getattr(accelerator, name)))
        try:
            with _replaced(getattr(self._trainer, "trl_module", None), self._functions):
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
        of_modes = self._trainer._metrics.values()
        noted = [one for each in (*(each for mode in of_modes for each in mode.values()), total) for one in each]
        noted = [one for one in noted if isinstance(one, DeferredNumber)]
        numbers = _numbers([*noted, *(count for one in noted for count in getattr(one, "counts", ()))])

        def exists(one: Any) -> bool:
            return not self._leaves_out or all(numbers[id(count)] for count in getattr(one, "counts", ()))

        for mode in of_modes:
            for name, each in [*mode.items()]:
                read = [numbers.get(id(one), one) for one in each if exists(one)]
                if each and not read:
                    del mode[name]
                each[:] = read
        self._trainer._total_train_tokens = numbers.get(id(total[0]), total[0])
        self._waiting = 0


def _numbers(tensors: Sequence[torch.Tensor]) -> dict[int, Any]:
    """The numbers in `tensors`, 0-d, by their ids; read once for each dtype."""
    with torch._C.DisableTorchFunctionSubclass():
        by_dtype: dict[torch.dtype, dict[int, torch.Tensor]] = {}  # in fp32, fp64, and counts
        for each in tensors:
            by_dtype.setdefault(each.dtype, {})[id(each)] = each
        read = ((of, torch.stack([*of.values()]).tolist()) for of in by_dtype.values())
        return {key: number for of, numbers in read for key, number in zip(of, numbers, strict=True)}


def _deferring(gather: Callable[..., Any]) -> Callable[..., Any]:
    def gathered(*args: Any, **kwargs: Any) -> Any:
        found = gather(*map(plain, args), **kwargs)
        return found.detach().as_subclass(DeferredNumber) if type(found) is torch.Tensor else found

    return gathered


@contextlib.contextmanager
def _replaced(module: ModuleType | None, functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """In the context, `module` finds these functions at its names; what they return is the same."""
    if not functions:
        yield
        return
    names = vars(module)
    theirs = {name: names[name] for name in functions}
    try:
        names.update(functions)
        yield
    finally:
        names.update(theirs)


def nanmin(tensor: torch.Tensor) -> torch.Tensor:
    """The least of the numbers in `tensor` that are not NaN, 0-d; NaN if all are. Waits for nothing."""
    is_nan = tensor.isnan()
    return torch.where(is_nan, math.inf, tensor).min().masked_fill(is_nan.all(), math.nan)


def nanmax(tensor: torch.Tensor) -> torch.Tensor:
    """The largest of the numbers in `tensor` that are not NaN, 0-d; NaN if all are. Waits for nothing."""
    return -nanmin(-tensor)


class DeferredMetricsMixin:
    """Comes before a trainer of TRL, whose loss notes its metrics in `_deferred`, and reads them in time."""

    _deferred: DeferredMetrics | None

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
    """Whether a trainer's metrics may wait: not where reading them does not wait, or code of the user may see them.

    Apple's devices have no fp64, in which metrics are calculated.
    """
    own = trainer._has_users_loss or callable(trainer.compute_loss_func)
    return trainer.args.device.type not in ("cpu", "mps") and not own
