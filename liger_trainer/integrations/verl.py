"""verl: `actor_rollout_ref.model.external_lib=liger_trainer.integrations.verl` and `...model.use_liger=True`.

verl imports this file in each of its workers, before it builds a model. For `use_liger` it calls one function of
`liger_kernel`, which importing this file replaces, with the model that has been loaded: before it has adapters, before
verl's own patches and before FSDP. So what verl replaces later is left alone here.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from liger_trainer.liger import stand_in
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.stock_trainer import liger_kernel_installed

_MODULE = "liger_kernel.transformers.monkey_patch"
_FUNCTION = "_apply_liger_kernel_to_instance"
_VERLS_OWN = ("attention", "linear_cross_entropy", "cross_entropy", "load_balancing_loss")
"""What verl patches or computes itself: attention, the forward of the whole model, and log-probabilities of logits."""


def apply_for_verl(model: nn.Module, **flags: bool) -> None:
    """Applies the kernels of the layers to `model`, and prints the report in the first process.

    Args:
        model: The model as it was loaded. Of one with images, verl replaces the attention's forward, so that its
            rotation is left alone.
        **flags: Liger's flags; verl passes `fused_linear_cross_entropy=False` and `swiglu=True`.

    Raises:
        ValueError: for an unknown flag.
    """
    own: dict[str, Any] = dict.fromkeys(_VERLS_OWN, False)
    if hasattr(getattr(model, "config", None), "vision_config"):
        own["rope"] = False
    report = apply_liger_kernel(model, own | flags)
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(report, flush=True)


def _install() -> None:
    if not liger_kernel_installed():
        stand_in.install()
    module = importlib.import_module(_MODULE)
    if not hasattr(module, _FUNCTION):
        raise ImportError(f"{_MODULE} has no {_FUNCTION}, which verl calls for `use_liger`. Update liger-kernel.")
    setattr(module, _FUNCTION, apply_for_verl)


_install()
