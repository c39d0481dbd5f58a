"""Graphs on a CPU: launches are operators, recorded with the memory that they read and write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "bincount", "histc", "masked_select", "equal"}
"""Operators for which the host waits for the device, which no graph can hold."""


class _NeverWaiting(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if operator.overloadpacket.__name__ in WAITING:
            raise RuntimeError(f"{operator}: operation not permitted when stream is capturing")
        return operator(*args, **(kwargs or {}))


class Recorder(_NeverWaiting):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []
        self._made: dict[int, torch.Tensor] = {}

    def spoil(self) -> None:
        """Writes NaN to all that is computed here, as a graph does that got the same memory."""
        for each in self._made.values():
            each.data.fill_(torch.nan)

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        given = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        for each in _tensors(result):
            place = each.untyped_storage().data_ptr()
            if place not in given and each.is_floating_point():
                self._made[place] = each
        self.calls.append((operator, args, kwargs or {}, result))
        return result


class RecordedCaptures:
    """Captures operators as a CUDA graph captures launches: replayed, each reads and writes where it did.

    Graphs that keep something get the memory of those that another forward has captured.

    Args:
        limit: Bytes that graphs may take.
        each: Bytes that each takes.
    """

    def __init__(self, limit: int = 2**40, each: int = 0) -> None:
        self.limit, self._each = limit, each
        self.taken = self.renewals = self.settled = 0
        self.count = 0
        self.is_busy = False
        self.operators: list[list[str]] = []  # the names of those of each graph
        self._kept: list[tuple[int, Recorder]] = []

    def __call__(self, run: Callable[[], None], keeps: bool = False) -> Callable[[], None]:
        self.count += 1
        self.taken += self._each
        recorder = Recorder()
        with recorder:
            run()
        self.operators.append([operator.overloadpacket.__name__ for operator, *_ in recorder.calls])
        forward = getattr(getattr(run, "__self__", None), "captured_in", 0)
        if keeps:
            self._kept.append((forward, recorder))

        def replay() -> None:
            for other, each in self._kept if keeps else ():
                if other != forward:
                    each.spoil()
            with torch.no_grad():
                for operator, args, kwargs, result in recorder.calls:
                    args, kwargs = tree_map(_memory, (args, kwargs))
                    _write(result, operator(*args, **kwargs))

        return replay

    def renew(self) -> None:
        self.taken, self.renewals = 0, self.renewals + 1
        self._kept.clear()

    def settle(self) -> None:
        self.settled += 1

    @contextlib.contextmanager
    def tried(self) -> Iterator[Callable[[], bool]]:
        with _NeverWaiting():
            yield lambda: self.is_busy

    def beside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def _memory(value: Any) -> Any:
    """A tensor without its version: autograd sees nothing of what a graph writes."""
    return value.data if isinstance(value, torch.Tensor) else value


def _write(fixed: Any, result: Any) -> None:
    for one, other in zip(tree_leaves(fixed), tree_leaves(result)):
        if isinstance(one, torch.Tensor) and one.data_ptr() != other.data_ptr():
            one.data.copy_(other)
