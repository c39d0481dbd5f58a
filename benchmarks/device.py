"""The clock and the memory counter that everything is measured with."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from liger_trainer.benchmarks.registry import BenchmarkError
from liger_trainer.compat.private import available
from liger_trainer.compat.torch import BUSY_DEVICE


class Device:
    """Clock and memory counter of one device: events where it has them, the wall clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._flush: torch.Tensor | None = None

    def name(self) -> str:
        """The device's name, as the tables print it."""
        return "CPU" if self.module is None else self.module.get_device_name(self.device)

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.module is not None:
            self.module.synchronize()

    def works(self) -> bool:
        """Whether the device still computes; after some errors every later call of the process fails too."""
        try:
            return torch.ones(2, device=self.device).sum().item() == 2
        except RuntimeError:
            return False

    def empty_cache(self) -> None:
        """Releases cached memory that is not in use."""
        if self.module is not None:
            self.module.empty_cache()

    def collect(self) -> None:
        """Releases memory that only reference cycles hold, such as those of an error's traceback."""
        if self.module is not None:  # it takes a third of a second
            gc.collect()
            self.module.empty_cache()

    def peak_gibibytes(self, work: Callable[[], object]) -> float | None:
        """Peak memory of `work` above what is allocated before it."""
        if self.module is None:
            return None
        self.synchronize()
        before = self.module.memory_allocated()
        self.module.reset_peak_memory_stats()
        work()
        self.synchronize()
        return (self.module.max_memory_allocated() - before) / 2**30

    def saved_gibibytes(self, forward: Callable[[], tuple[torch.Tensor, ...]]) -> float | None:
        """Memory that `forward` saves for backward: what is freed with the graph while the outputs stay."""
        if self.module is None:
            return None
        outputs = forward()
        held = self.module.memory_allocated()
        outputs = tuple(output.detach() for output in outputs)
        return (held - self.module.memory_allocated()) / 2**30

    def mark(self) -> Any:
        """A point in the device's work, for `elapsed`."""
        if self.module is None:
            return time.perf_counter()
        event = self.module.Event(enable_timing=True)
        event.record()
        return event

    def elapsed(self, marks: Sequence[Any]) -> list[float]:
        """Milliseconds between each of the `marks` and the next."""
        self.synchronize()
        if self.module is None:
            return [(after - before) * 1e3 for before, after in itertools.pairwise(marks)]
        return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]

    def time(self, *parts: Callable[[Any], Any]) -> list[float]:
        """Milliseconds of each part, run one directly after the other; each gets the result of the one before."""
        result: Any = None
        if self.module is not None:
            self._prepare()
        marks = [self.mark()]
        for part in parts:
            result = part(result)
            marks.append(self.mark())
        return self.elapsed(marks)

    def median(self, work: Callable[[], object], rounds: int = 9) -> float:
        """Median milliseconds of `work`, which runs once before."""
        work()
        return statistics.median(self.time(lambda _: work())[0] for _ in range(rounds))

    def _prepare(self) -> None:
        """Evicts the data from the L2 cache, and keeps the device busy while the host queues what is timed.

        The cache is left full of written lines, as after a kernel in training: the timed code writes them back, and
        leaves as many of its own.
        """
        if self._flush is None:
            self._flush = torch.empty(256 * 2**20, dtype=torch.int8, device=self.device)
        self._flush.zero_()
        if self.module is torch.cuda and available(BUSY_DEVICE):
            torch.cuda._sleep(10_000_000)  # about 5 ms


def find_device(name: str | None) -> torch.device:
    """The device called `name`; by default the accelerator, or the CPU without one.

    Raises:
        BenchmarkError: if this machine has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BenchmarkError(f"No device {name!r}.") from None
    if device.type != "cpu" and (accelerator is None or device.type != accelerator.type):
        raise BenchmarkError(f"This machine has no {name!r}; it has {accelerator or 'no accelerator'}.")
    return device
