"""What a test of one GPU needs: a single device in sight, no wait of the host, and a CUDA graph of a step."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

# A trainer in one process that sees several is refused.
one_gpu = pytest.mark.skipif(
    torch.cuda.device_count() > 1, reason="needs one visible GPU; run with CUDA_VISIBLE_DEVICES=0"
)


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Every wait of the host for the device is an error. Steps run once before this, which compiles their kernels."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
