"""Capturing launches as CUDA graphs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

Run = Callable[[], None]
"""Reads and writes tensors that stay where they are, and returns nothing."""


class Captures(Protocol):
    """How the launches of a function are captured."""

    def __call__(self, run: Run) -> Run:
        """Captures the launches of `run`, and returns what launches them again."""

    def beside(self) -> contextlib.AbstractContextManager[None]:
        """Where `run` is called once before: what it allocates for good, such as workspaces, is then in no graph."""

    def random_state(self) -> torch.Tensor:
        """The state of the generator of which launches draw; a graph draws the numbers that follow it when it runs."""

    def set_random_state(self, state: torch.Tensor) -> None:
        """Has the next launches draw the numbers that follow `state`."""


class CudaCaptures:
    """Captures CUDA graphs that share one pool of memory.

    What a graph has freed again at its end, the next one may use. So nothing that a graph computes may be read once
    another has run, unless it was still held when the other was captured.

    Args:
        device: Where the launches run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        """Captures the launches of `run`.

        Raises:
            RuntimeError: if `run` waits for the device, or does something else that no graph can hold.
        """
        graph = torch.cuda.CUDAGraph()
        with self.beside(), _without_collection():
            # Other threads, such as one that pins the memory of batches, may call CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # that the capture has failed, which `run` has said better
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """On the stream of the captures, after what was launched so far and before what comes."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def random_state(self) -> torch.Tensor:
        """The state of the device's own generator, which every graph registers: seed and offset, on the host."""
        return torch.cuda.get_rng_state(self._device)

    def set_random_state(self, state: torch.Tensor) -> None:
        """Sets it."""
        torch.cuda.set_rng_state(state, self._device)


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    """Keeps the garbage collector from freeing memory of other streams, which ends a capture with an error."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
