"""Peak memory of this process."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Protocol

import torch
from transformers import TrainerState, TrainingArguments

from liger_trainer.callbacks.logged import LoggedMetricsCallback

_GIB = 2**30

_remembered: dict[torch.device, int] = {}


class Reserve(Protocol):
    """Memory that is in use, though the allocator's peak does not count it, such as that of CUDA graphs.

    Attributes:
        device: Where it is.
        reserved: Bytes.
    """

    device: torch.device
    reserved: int


_reserves: weakref.WeakSet[Reserve] = weakref.WeakSet()


class MemoryCallback(LoggedMetricsCallback):
    """Logs `peak_memory_gib`, the most this process has had allocated so far.

    On an accelerator that is the peak of the caching allocator (`max_memory_allocated`) and the memory of CUDA graphs.
    The allocator's counter is not reset, so that others can measure with it, but for `activation_memory`, in the second
    step, and after a step in which layers were captured. On a CPU it is the peak resident memory of the process.
    """

    def metrics(self, args: TrainingArguments, state: TrainerState) -> dict[str, float]:
        """Peak so far."""
        return {"peak_memory_gib": round(peak_memory(args.device) / _GIB, 3)}

    summary = metrics


def add_reserve(reserve: Reserve) -> None:
    """Has the peak count `reserve` as long as it exists."""
    _reserves.add(reserve)


def remember_peak(device: torch.device) -> None:
    """To be called before the allocator's peak of `device` is reset."""
    _remembered[_indexed(device)] = peak_memory(device)


def reset_peak(device: torch.device) -> None:
    """Has the peak of an accelerator begin anew with what is allocated now."""
    _remembered.pop(_indexed(device), None)
    torch.get_device_module(device).reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: the peak of the allocator of `device`, and reserves; on a CPU, that of the process's resident memory."""
    backend: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if hasattr(backend, "max_memory_allocated"):
        device = _indexed(device)
        reserved = sum(reserve.reserved for reserve in _reserves if _indexed(reserve.device) == device)
        return max(_remembered.get(device, 0), backend.max_memory_allocated(device) + reserved)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def share_of(device: torch.device) -> float:
    """The share of an accelerator's memory that this process may have (`set_per_process_memory_fraction`)."""
    share = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)
    return 1.0 if share is None else share(_indexed(device))


def _indexed(device: torch.device) -> torch.device:
    """An accelerator with its index, which is that of the current one if it has none."""
    index = torch.get_device_module(device).current_device() if device.index is None else device.index
    return torch.device(device.type, index)
