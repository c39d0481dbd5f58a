"""What tests ask of work on a GPU: that it never waits for the device, and that a CUDA graph repeats it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Inside, an operation that waits for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_replayed_without_host_sync(run: Callable[[], Sequence[torch.Tensor]]) -> None:
    """`run` never waits for the device, and a CUDA graph of it gives the same bits."""
    expected = [result.clone() for result in run()]
    with no_host_sync():
        run()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        results = run()
    graph.replay()
    assert all(map(torch.equal, results, expected))
