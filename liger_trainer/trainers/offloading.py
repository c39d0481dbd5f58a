"""Offloading of activations: all that autograd saves for the backward, or a fraction of it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import TrainingArguments

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import PARTIAL_OFFLOADING
from liger_trainer.compat.trl import OFFLOADING

require(PARTIAL_OFFLOADING)


def check_offloading(args: TrainingArguments) -> None:
    """Checks that there is a device to offload from."""
    if getattr(args, "activation_offloading", False) and args.device.type == "cpu":
        raise ValueError("`activation_offloading` is true, but training is on the CPU; set it to false.")


def step_offloading(trainer: Any) -> contextlib.AbstractContextManager:
    """The context that a training step is to run in: TRL's activation offloading, of the fraction that is asked for.

    The trainers of TRL that offload by themselves get a context that does nothing; theirs is reduced to the fraction.
    """
    args = trainer.args
    if not getattr(args, "activation_offloading", False):
        return contextlib.nullcontext()
    get_act_offloading_ctx_manager, *_ = require(OFFLOADING)
    fraction = getattr(args, "activation_offloading_fraction", 1.0)
    of_trl = getattr(trainer, "maybe_activation_offload_context", None)  # which TRL's training step enters
    if of_trl is not None:
        if fraction < 1:
            trainer.maybe_activation_offload_context = PartialOffload(of_trl, fraction)
        return contextlib.nullcontext()
    check_offloading(args)
    context = get_act_offloading_ctx_manager(trainer.model)
    return PartialOffload(context, fraction) if fraction < 1 else context


class PartialOffload(saved_tensors_hooks):
    """Passes a fraction of what autograd saves for the backward to hooks that offload it; the rest stays on the device.

    Tensors are chosen by error diffusion over their bytes, in the order in which they are saved. The choice is spread
    evenly over the forward, is the same at every step, and misses the fraction by at most half of the largest tensor.
    A tensor and its views share one decision. Parameters do not count; the hooks of `offload` leave them alone.
    """

    def __init__(self, offload: saved_tensors_hooks, fraction: float) -> None:
        self.offload = offload
        self.fraction = fraction
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._due = 0.0  # bytes that should have been offloaded so far, less those that were
        self._moved: Any = WeakTensorKeyDictionary()  # whether a tensor is offloaded
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
            self._due += self.fraction * tensor.nbytes
            self._moved[whole] = self._due >= tensor.nbytes / 2
            self._due -= tensor.nbytes * self._moved[whole]
        # Detached: an output that its own graph references would stay until the garbage collector runs.
        return self.offload.pack_hook(tensor) if self._moved[whole] else tensor.detach()

    def _unpack(self, packed: Any) -> torch.Tensor:
        # What the offloading hooks have packed is a key, never a tensor.
        return packed if isinstance(packed, torch.Tensor) else self.offload.unpack_hook(packed)
