"""Models with `use_kernels`: whether they have our kernels, and keep them when they take those of another library.

A model that took ours because of `use_kernels` holds a number: how many layers of PEFT it had then. A later call puts
kernels into layers that came since.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from liger_trainer.compat.peft import TUNER_LAYERS
from liger_trainer.compat.private import available
from liger_trainer.head.warn_once import warn_once
from liger_trainer.patching.as_written import is_bound_by_us
from liger_trainer.patching.binding import bound_modules

_ADAPTERS = "_liger_trainer_adapters"


def lacks_kernels(model: nn.Module) -> bool:
    """Whether `model` has no kernels of ours, or has other adapters than when `use_kernels` put them in."""
    known = model.__dict__.get(_ADAPTERS)
    return not any(bound_modules(model)) or (known is not None and known != _count_adapters(model))


def remember(model: Any) -> None:
    """Notes that `model` has our kernels because of `use_kernels`."""
    setattr(model, _ADAPTERS, _count_adapters(model))
    model._use_kernels = True


def remembered(module: nn.Module) -> bool:
    """Whether [`remember`] has noted this module."""
    return _ADAPTERS in module.__dict__


def forget(model: nn.Module) -> None:
    """Takes [`remember`] back, for every model of transformers in `model`."""
    for module in model.modules():
        if module.__dict__.pop(_ADAPTERS, None) is not None:
            module._use_kernels = False  # type: ignore[assignment]


def _count_adapters(model: nn.Module) -> int:
    if "peft" not in sys.modules or not available(TUNER_LAYERS):
        return 0
    from peft.tuners.tuners_utils import BaseTunerLayer

    return sum(isinstance(module, BaseTunerLayer) for module in model.modules())


@contextlib.contextmanager
def forwards_kept(model: nn.Module) -> Iterator[None]:
    """Modules that have a forward of ours keep it when the `kernels` library gives the model its own."""
    ours = {module: module.forward for module in model.modules() if is_bound_by_us(module)}
    try:
        yield
    finally:
        replaced = [module for module, forward in ours.items() if module.forward is not forward]
        for module in replaced:
            module.forward = ours[module]  # type: ignore[method-assign]
    if replaced:
        names = ", ".join(sorted({type(module).__name__ for module in replaced}))
        warn_once(
            f"use_kernels {names}",
            f"`use_kernels`: {names} of {type(model).__name__} keep liger_trainer's kernels. To run those of the "
            "`kernels` library there, call liger_trainer.revert_liger_kernel(model) and then "
            "model.set_use_kernels(True, transformers.KernelConfig()). (Shown once.)",
        )
