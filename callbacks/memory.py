"""Peak memory of this process."""

from __future__ import annotations

import sys
from typing import Any

import torch
from liger_trainer.callbacks.logged import LoggedMetricsCallback
from transformers import TrainerControl, TrainerState, TrainingArguments

_GIB = 2**30


class MemoryCallback(LoggedMetricsCallback):
    """Logs `peak_memory_gib`, the most this process had allocated since the last training log.

    On an accelerator that is the peak of the caching allocator (`max_memory_allocated`), and the counter is reset at
    each log; the peak of the whole run is kept here and logged at its end as `train_peak_memory_gib`. On a CPU it is
    the process's peak resident memory, which the system does not reset.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Starts a new measurement."""
        self.peak_bytes = 0
        _reset_peak(args.device)

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Peak since the last training log."""
        peak = _peak(args.device)
        self.peak_bytes = max(self.peak_bytes, peak)
        _reset_peak(args.device)
        return {"peak_memory_gib": round(peak / _GIB, 3)}

    def summary(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Peak of the whole run."""
        self.peak_bytes = max(self.peak_bytes, _peak(args.device))
        return {"peak_memory_gib": round(self.peak_bytes / _GIB, 3)}


def _peak(device: torch.device) -> int:
    backend = _allocator(device)
    if backend is not None:
        return backend.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _reset_peak(device: torch.device) -> None:
    backend = _allocator(device)
    if backend is not None:
        backend.reset_peak_memory_stats(device)


def _allocator(device: torch.device) -> Any:
    if device.type == "cpu":
        return None
    backend = torch.get_device_module(device)
    return backend if hasattr(backend, "reset_peak_memory_stats") else None
