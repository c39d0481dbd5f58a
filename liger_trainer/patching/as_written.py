"""When a patched module runs its class's own code, to which our forward was proved equal."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

import torch

from liger_trainer.context_variables import set_to
from liger_trainer.kernels.runtime import triton_drives

_generates: ContextVar[bool] = ContextVar("liger_trainer_generates", default=False)


def generation_step() -> contextlib.AbstractContextManager[None]:
    """Marks the forward inside as a step of a generation, whose logits are only sampled from."""
    return set_to(_generates, True)


def serves_as_written(x: torch.Tensor) -> bool:
    """Whether the class's own code runs for `x`, because it takes fewer steps.

    That is in a generation on a device without kernels, such as the CPU. The forward of a reference model is not one,
    and has to round as the policy's forward does.
    """
    if torch.is_grad_enabled() or triton_drives(x.device) or torch.compiler.is_compiling():
        return False
    return _generates.get()
