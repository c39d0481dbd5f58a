"""Capturing launches as CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from liger_trainer.callbacks.memory import add_reserve, remember_peak, share_of
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import FAILED_CAPTURES

(end_allocations,) = require(FAILED_CAPTURES)

# Graphs may take 1 / `_SHARE` of the device's memory. A step that keeps more in its layers does not wait for Python.
_SHARE = 4
# The device counts as busy if it takes more than this many times as long as the host. Otherwise it has finished each
# launch before the next one comes, and takes as long as the host.
_BUSY = 1.2

Run = Callable[[], None]
"""Reads and writes tensors at fixed addresses, and returns nothing."""


class Captures(Protocol):
    """How the launches of a function are captured.

    Attributes:
        taken: Bytes that the pools of the graphs occupy.
        limit: The most bytes that graphs, and what they read and write, are to take.
        renewals: How often `renew` was called; graphs that were captured before the last call must not run.
    """

    taken: int
    limit: int
    renewals: int

    def __call__(self, run: Run, keeps: bool = False) -> Run:
        """Captures the launches of `run`, and returns a function that replays them.

        What it computes may be read until another function runs that was captured with the same `keeps`.
        """

    def renew(self) -> None:
        """Begins new memory for later graphs; that of earlier graphs is freed once all of these are dropped."""

    def settle(self) -> None:
        """To be called after a step: gives back memory that its trials and captures have left."""

    def tried(self) -> contextlib.AbstractContextManager[Callable[[], bool]]:
        """For a call of `run` before its capture: what it allocates for good, such as workspaces, is then in no graph.

        If the host waits for the device in the context, that raises a RuntimeError. The context yields a function that
        says afterwards whether the device took longer than the host's launches, so that a graph would gain nothing.
        """

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """A context like `tried`, in which the host may wait for the device."""

    def random_state(self) -> torch.Tensor:
        """The state of the generator from which launches draw; a graph draws what follows the state at its replay."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Makes the next launches draw the numbers that follow `state`."""


class CudaCaptures:
    """Captures CUDA graphs that share two pools of memory: one for graphs that keep something, one for the others.

    Memory that is free at the end of a graph may be used by the next graph of its pool. So nothing that a graph
    computes may be read once another of its pool has run, unless it was still held when the other was captured.

    Args:
        device: Where the launches run.

    Attributes:
        reserved: Bytes that the pools occupied after the last step with captures.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.reserved = device, 0
        self._has_room = False  # whether torch has given back what it had cached
        self._stream = torch.cuda.Stream(device)
        self._scratch = torch.empty(1, device=device)
        self.limit = int(torch.cuda.get_device_properties(device).total_memory * share_of(device)) // _SHARE
        self.renewals = -1
        self.renew()
        self._is_settled = True
        add_reserve(self)

    def renew(self) -> None:
        """Begins two new pools, for all later graphs.

        Torch keeps the memory of a pool until no graph uses it, so all earlier graphs have to be dropped.
        """
        self.taken, self.reserved, self.renewals = 0, 0, self.renewals + 1
        self._is_settled = False
        self._pools = {keeps: self._new_pool() for keeps in (False, True)}

    def settle(self) -> None:
        """Gives back memory that trials and captures have left, which torch caches for their stream.

        That waits for the device. So `beside` alone leaves nothing to settle: a layer may run beside its graphs in each
        step.
        """
        if self._is_settled:
            return
        self._is_settled, self._has_room = True, False
        self.reserved = 0  # the allocator's peak includes what was captured since
        remember_peak(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.reserved = self.taken
        torch.cuda.empty_cache()

    def __call__(self, run: Run, keeps: bool = False) -> Run:
        """Captures the launches of `run`.

        Raises:
            RuntimeError: if `run` waits for the device, or does something else that no graph can hold.
        """
        self._is_settled = False
        if not self._has_room:  # in a capture, torch cannot give back its cache when memory is short
            self._has_room = True
            torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with self._counted(), self.beside(), _without_collection():
            # Other threads, such as one that pins the memory of batches, may call CUDA meanwhile.
            graph.capture_begin(pool=self._pools[keeps][0], capture_error_mode="thread_local")
            try:
                run()
                graph.capture_end()
            except BaseException:
                self._recover(graph, keeps)
                raise
        return graph.replay

    def _recover(self, graph: torch.cuda.CUDAGraph, keeps: bool) -> None:
        """Ends a capture that has failed."""
        try:
            graph.capture_end()
        except RuntimeError:
            # The capture failed in CUDA, and torch leaves its allocator and generator capturing. The next capture that
            # succeeds ends that of the generator.
            end_allocations(self._stream.device_index, self._pools[keeps][0])
            self._pools[keeps] = self._new_pool()

    def _new_pool(self) -> tuple[Any, torch.cuda.CUDAGraph]:
        """A pool, and a graph that keeps it in use: torch begins no capture in a pool that no graph uses any more."""
        pool, graph = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with self._counted(), self.beside(), _without_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            self._scratch.zero_()
            graph.capture_end()
        return pool, graph

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts by how much the memory of the pools grows: a capture allocates from them alone."""
        before = torch.cuda.memory_reserved(self.device)
        try:
            yield
        finally:
            self.taken += max(0, torch.cuda.memory_reserved(self.device) - before)

    @contextlib.contextmanager
    def tried(self) -> Iterator[Callable[[], bool]]:
        """`beside`, where waiting for the device is an error.

        A capture would fail on that too, but torch would have to be repaired afterwards (`_recover`).
        """
        self._is_settled = False
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        launching = 0.0

        def was_busy() -> bool:
            end.synchronize()
            return begin.elapsed_time(end) > _BUSY * 1e3 * launching

        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the mode is called a prototype; what it misses fails in the capture
            torch.cuda.set_sync_debug_mode("error")
        try:
            with self.beside():
                begin.record()
                started = time.perf_counter()
                yield was_busy
                launching = time.perf_counter() - started
                end.record()
        finally:
            torch.cuda.set_sync_debug_mode(before)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Runs on the stream of the captures, after all that was launched before and before all that comes after."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:  # what has been launched before an error may still write
            current.wait_stream(self._stream)

    def random_state(self) -> torch.Tensor:
        """The state of the device's own generator, which every graph registers: seed and offset, on the host."""
        return torch.cuda.get_rng_state(self.device)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Sets the state of the device's own generator."""
        torch.cuda.set_rng_state(state, self.device)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Keeps the garbage collector from freeing memory of other streams, which would make the capture fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
