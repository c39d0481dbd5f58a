"""GPU memory that a call allocates."""

from collections.abc import Callable
from typing import Any

import torch


def peak_memory(run: Callable[[], Any]) -> int:
    """The most bytes that `run` allocates at a time, its result included; it has run once before that."""
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() - before
