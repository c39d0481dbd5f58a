"""Offloading activations: where it cannot be, and a part of what autograd saves while the rest waits where it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import TrainingArguments

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import PARTIAL_OFFLOADING

require(PARTIAL_OFFLOADING)


def check_offloading(args: TrainingArguments) -> None:
    """Checks that there is a device to offload from.

    Raises:
        ValueError: for `activation_offloading` in training on the CPU.
    """
    if getattr(args, "activation_offloading", False) and args.device.type == "cpu":
        raise ValueError("`activation_offloading` is true, but training is on the CPU; set it to false.")


class PartialOffload(saved_tensors_hooks):
    """Hands a fraction of what autograd saves to hooks that offload, and keeps the rest.

    Which tensors is decided by error diffusion over their bytes, in the order in which they are saved: what is moved is
    spread evenly over the forward, is the same at every step, and misses the fraction by half of the largest tensor at
    most. A tensor and its views share one decision. Parameters are not counted, as the offloading hooks leave them.

    Args:
        offload: The hooks, such as TRL's `OffloadActivations`; they are entered and left with this context.
        fraction: Of the bytes, between 0 and 1.
    """

    def __init__(self, offload: saved_tensors_hooks, fraction: float) -> None:
        self.offload = offload
        self.fraction = fraction
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._due = 0.0  # bytes that should have been moved by now, less those that were
        self._moved: Any = WeakTensorKeyDictionary()  # whether, by tensor
        self.offload.__enter__()
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.offload.__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> Any:
        whole = tensor if tensor._base is None else tensor._base
        if isinstance(whole, nn.Parameter):
            return self.offload.pack_hook(tensor)
        if whole not in self._moved:
            self._moved[whole] = self._is_due(tensor.nbytes)
        # Detached: an output that its own graph refers to would live until the garbage collector runs.
        return self.offload.pack_hook(tensor) if self._moved[whole] else tensor.detach()

    def _is_due(self, size: int) -> bool:
        self._due += self.fraction * size
        due = self._due >= size / 2
        self._due -= size * due
        return due

    def _unpack(self, packed: Any) -> torch.Tensor:
        # The offloading hooks pack a tensor as a key, never as a tensor.
        return packed if isinstance(packed, torch.Tensor) else self.offload.unpack_hook(packed)
