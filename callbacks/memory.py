"""Peak memory of this process."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from liger_trainer.callbacks.logged import LoggedMetricsCallback

_GIB = 2**30

_remembered: dict[torch.device, int] = {}


class MemoryCallback(LoggedMetricsCallback):
    """Logs `peak_memory_gib`, the most this process has had allocated so far.

    On an accelerator that is the peak of the caching allocator (`max_memory_allocated`), whose counter is not reset, so
    that others can measure with it; only `activation_memory` resets it, in the second step. On a CPU it is the peak
    resident memory of the process.
    """

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Peak so far."""
        return {"peak_memory_gib": round(peak_memory(args.device) / _GIB, 3)}

    summary = metrics


def remember_peak(device: torch.device) -> None:
    """To be called before the allocator's peak of `device` is reset."""
    _remembered[device] = peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: the peak of the allocator of `device`; on a CPU, that of the resident memory of the process."""
    backend: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if hasattr(backend, "max_memory_allocated"):
        return max(_remembered.get(device, 0), backend.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
