"""Models that are run and not trained, under FSDP2: their layers are units of their own, as those of the trained one.

TRL splits a reference as one unit, so a forward would gather the weights of all its layers. A teacher it does not split
at all: it stays whole where it was loaded, on the CPU, so that on GPUs the first step fails (huggingface/trl#2580).
"""

from __future__ import annotations

import copy
from typing import Any

from accelerate import Accelerator
from accelerate.utils import get_module_children_bottom_up
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from liger_trainer.compat.accelerate import SPLIT_LAYERS
from liger_trainer.compat.private import available
from liger_trainer.compat.trl import SPLIT_REFERENCE
from liger_trainer.kernels.runtime import is_dtensor


def split_layers(model: nn.Module, accelerator: Accelerator) -> None:
    """Splits the layers of `model`, before TRL splits what is left, if the launch is FSDP2.

    Args:
        model: With its whole weights.
        accelerator: The trainer's; its policy chooses the layers.
    """
    if not _may_split(accelerator) or isinstance(model, FSDPModule):
        return
    plugin, mesh = copy.copy(accelerator.state.fsdp_plugin), getattr(accelerator, "torch_device_mesh", None)
    if not {type(module).__name__ for module in model.modules()} >= {*(plugin.transformer_cls_names_to_wrap or ())}:
        plugin.transformer_cls_names_to_wrap = None  # layers of the trained model's class; this one says its own
    chosen = fsdp2_prepare_auto_wrap_policy(plugin, model)
    if chosen is None:
        return
    options: dict[str, Any] = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
    }
    options["ignored_params"] = get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device)
    for module in get_module_children_bottom_up(model)[:-1]:
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)  # without a forward, before which to gather
        if chosen(module) and not is_container and not isinstance(module, FSDPModule):
            fully_shard(module, **options)


def _may_split(accelerator: Accelerator) -> bool:
    return accelerator.is_fsdp2 and available(SPLIT_LAYERS) and available(SPLIT_REFERENCE)


def split_teacher(teacher: nn.Module, accelerator: Accelerator) -> None:
    """Splits `teacher`, layer by layer, if the launch is FSDP2.

    Quantised weights stay where they are, as FSDP2 cannot split all of them, and so do those that are split already.
    """
    if not _may_split(accelerator):
        return
    if getattr(teacher, "is_quantized", False) or any(map(is_dtensor, teacher.parameters())):
        return
    from trl.models import prepare_fsdp

    # A unit takes several dtypes of frozen weights alone, and TRL's loss would give a head that is split a gradient.
    teacher.requires_grad_(False)
    split_layers(teacher, accelerator)
    prepare_fsdp(teacher, accelerator)
