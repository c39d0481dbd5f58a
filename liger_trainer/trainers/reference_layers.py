"""The layers of a reference under FSDP2, each of which is split over the processes by itself.

TRL splits a reference as one: in its forward each process would gather the weights of all layers at once. accelerate
splits the policy layer by layer, by the same policy.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import get_module_children_bottom_up
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy, get_parameters_from_modules
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from liger_trainer.compat.accelerate import SPLIT_LAYERS
from liger_trainer.compat.private import available
from liger_trainer.compat.trl import SPLIT_REFERENCE


def split_layers(reference: nn.Module, accelerator: Accelerator) -> None:
    """Splits the layers of `reference`, before TRL splits what is left, if the launch is FSDP2.

    Args:
        reference: With its whole weights.
        accelerator: The trainer's; its policy chooses the layers.
    """
    if not accelerator.is_fsdp2 or isinstance(reference, FSDPModule):
        return
    if not available(SPLIT_LAYERS) or not available(SPLIT_REFERENCE):
        return
    plugin, mesh = accelerator.state.fsdp_plugin, getattr(accelerator, "torch_device_mesh", None)
    chosen = fsdp2_prepare_auto_wrap_policy(plugin, reference)
    if chosen is None:
        return
    options: dict[str, Any] = {
        "reshard_after_forward": plugin.reshard_after_forward,
        "offload_policy": plugin.cpu_offload,
        "mp_policy": plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        "mesh": None if mesh is None else mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)],
    }
    options["ignored_params"] = get_parameters_from_modules(plugin.ignored_modules, reference, accelerator.device)
    for module in get_module_children_bottom_up(reference)[:-1]:
        if chosen(module) and not isinstance(module, FSDPModule):
            fully_shard(module, **options)
