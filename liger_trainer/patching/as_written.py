"""When a patched module runs the code of its class, to which our forward was proved equal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from liger_trainer.kernels.runtime import triton_drives

_generates: ContextVar[bool] = ContextVar("liger_trainer_generates", default=False)


@contextlib.contextmanager
def generation_step() -> Iterator[None]:
    """Says that the forward inside is a step of a generation, whose logits are for sampling alone."""
    token = _generates.set(True)
    try:
        yield
    finally:
        _generates.reset(token)


def serves_as_written(x: torch.Tensor) -> bool:
    """Whether a forward of ours leaves `x` to the code that it was proved equal to, which then has fewer steps.

    That is in a generation where no kernel runs, as on the CPU. A reference model's forward is none, and must round as
    the policy's does.
    """
    if torch.is_grad_enabled() or triton_drives(x.device) or torch.compiler.is_compiling():
        return False
    return _generates.get()
