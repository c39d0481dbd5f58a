"""What an accelerator has left for activations."""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.callbacks.memory import remember_peak

_GIB = 2**30
_SLACK = 0.02  # of the device's memory, and at least 1 GiB, is left free
_FRAGMENTATION = 0.03  # of what is allocated, at least, is taken to be reserved beyond it


class DeviceMemory:
    """The caching allocator of torch on `device`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._retries = self._failed()
        self._highest = 0

    def allocated(self) -> int:
        """Bytes that are allocated now."""
        return self._backend.memory_allocated(self._device)

    def take_peak(self) -> int:
        """The most bytes that were allocated since the last call, of which `MemoryCallback` is told."""
        self.note_peak()
        peak = self._backend.max_memory_allocated(self._device)
        remember_peak(self._device)
        self._backend.reset_peak_memory_stats(self._device)
        return peak

    def note_peak(self) -> None:
        """Remembers the most bytes allocated so far, for [`limit`], should anybody reset the allocator's counter.

        Without the peak of the step that reserved them, reserved bytes would all count as fragments.
        """
        self._highest = max(self._highest, self._backend.max_memory_allocated(self._device))

    def limit(self) -> float:
        """Bytes that may be allocated, so that what else is on the device and the allocator's fragments fit beside it.

        The allocator reserves more than it gives out: fragments, and the blocks of other streams, such as those in
        which FSDP2 gathers weights. That much is taken off as it is, since it does not grow with what layers keep.

        To be called after a whole training step, when the optimizer and the communication have what they need.
        """
        free, total = self._backend.mem_get_info(self._device)
        statistics = self._backend.memory_stats(self._device)
        self.ran_out()  # what happened before is in these numbers
        others = total - free - statistics["reserved_bytes.all.current"]
        room = total - others - max(_SLACK * total, _GIB)
        self.note_peak()
        fragments = statistics["reserved_bytes.all.peak"] - self._highest
        return min(room - fragments, room / (1 + _FRAGMENTATION))

    def ran_out(self) -> bool:
        """Whether the allocator had to give its fragments back since the last call, for a block that did not fit."""
        before, self._retries = self._retries, self._failed()
        return self._retries > before

    def _failed(self) -> int:
        return self._backend.memory_stats(self._device).get("num_alloc_retries", 0)
