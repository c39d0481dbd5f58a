"""What a test of one GPU needs: one visible device, no host synchronisation, a CUDA graph, and the peak memory."""

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

# A trainer in one process that sees several is refused.
one_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 1, reason="needs one visible GPU; run with CUDA_VISIBLE_DEVICES=0"
)


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Inside, an operation that waits for the device is an error. Run a step once before, to compile its kernels."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_no_host_sync(step: Callable[[], Any]) -> None:
    """Runs `step` with `no_host_sync`, after a first time, in which compiling kernels and loading cuBLAS may wait."""
    step()
    with no_host_sync():
        step()


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `step`, run before so that its kernels are compiled, and the results that each replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def assert_replayed_without_host_sync(run: Callable[[], Sequence[torch.Tensor]]) -> None:
    """`run` never waits for the device, and a CUDA graph of it gives the same bits."""
    expected = [result.clone() for result in run()]
    with no_host_sync():
        run()
    graph, results = captured(run)
    graph.replay()
    assert all(map(torch.equal, results, expected))


def peak_memory(run: Callable[[], Any]) -> int:
    """The most bytes that `run` allocates at a time, its result included; it runs once before that."""
    run()
    return peak_memory_of_one_run(run)


def peak_memory_of_one_run(run: Callable[[], Any]) -> int:
    """As [`peak_memory`], without a run before it: what the first run compiles and sets up counts too."""
    gc.collect()  # what an earlier test has left would be freed in the middle
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before
