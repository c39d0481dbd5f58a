"""LLaMA-Factory, the trainers of `llamafactory.v1`: `kernel_config: {name: liger_trainer, include_kernels: auto}`.

Importing this file registers the plug-in, which LLaMA-Factory calls with a model that has its adapters. It imports no
files of its users, so the script that starts the training imports this one first. The trainers before v1 need none of
it: they are the Trainer of transformers, which runs our kernels for `use_liger_kernel: true`.
"""

from __future__ import annotations

from typing import Any

from llamafactory.v1.plugins.model_plugins.kernels.interface import KernelPlugin
from llamafactory.v1.utils import logging
from torch import nn

from liger_trainer.configs.kernel_config import KERNEL_KEYS
from liger_trainer.patching.apply import apply_liger_kernel

logger: Any = logging.get_logger(__name__)  # with LLaMA-Factory's handler, and a method for the first process


@KernelPlugin("liger_trainer").register()
def apply(model: nn.Module, include_kernels: str | bool | None = None) -> nn.Module:
    """Applies the kernels to `model`, and logs the report.

    Args:
        model: The model, a PEFT model with adapters.
        include_kernels: As in LLaMA-Factory: ``"auto"`` or True for all, names with commas between them for those
            alone, such as ``"rms_norm,lora"``, and None or False for none.

    Returns:
        The same model.

    Raises:
        ValueError: for an unknown name.
    """
    if not include_kernels:
        return model
    config: dict[str, bool] = {}
    if isinstance(include_kernels, str) and include_kernels != "auto":
        config = dict.fromkeys(KERNEL_KEYS, False)
        config |= {name.strip(): True for name in include_kernels.split(",") if name.strip()}
    logger.info_rank0(str(apply_liger_kernel(model, config)))
    return model
