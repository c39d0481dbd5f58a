"""axolotl: `plugins: [liger_trainer.integrations.axolotl.LigerTrainerPlugin]`.

axolotl calls `register` with the config as it was written, validates it with [`LigerTrainerArgs`] among the bases of
its schema, builds the model and its adapters, applies its own patches, and then calls `post_model_load`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, model_validator
from torch import nn
from transformers import TrainerCallback

from liger_trainer.callbacks.kernel_report import KernelReportCallback
from liger_trainer.configs.kernel_config import KernelConfig
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.report import KernelReport

logger = logging.getLogger("liger_trainer")

_HEAD = ("linear_cross_entropy", "cross_entropy")
_MLP = ("swiglu", "geglu")
_LORA_KEYS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
_SAME_LAYERS: dict[str, tuple[str, ...]] = {
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_rms_norm_gated": ("rms_norm",),
    "liger_layer_norm": ("layer_norm",),
    "liger_glu_activation": _MLP,
    "liger_cross_entropy": _HEAD,
    "liger_fused_linear_cross_entropy": _HEAD,
    "cut_cross_entropy": _HEAD,
    "chunked_cross_entropy": _HEAD,
    "flash_attn_cross_entropy": _HEAD,
    "tiled_mlp": _MLP,
    **dict.fromkeys(_LORA_KEYS, ("lora",)),
}
"""axolotl's own keys for kernels, and the switches of ours that are for the same layers."""


class LigerTrainerArgs(BaseModel):
    """The keys that the plug-in adds to axolotl's config.

    Attributes:
        liger_kernel_config: Switches as in [`liger_trainer.KernelConfig`], such as ``{"rope": False}``. All kernels by
            default.
        strict_kernels: Whether a kernel that cannot be applied is an error. False by default.
    """

    liger_kernel_config: dict[str, Any] | None = None
    strict_kernels: bool | None = None

    @model_validator(mode="after")
    def one_kernel_for_a_layer(self) -> LigerTrainerArgs:
        """Refuses a wrong switch, and keys of axolotl's that replace the layers that a switch of ours is for."""
        config = KernelConfig.parse(self.liger_kernel_config)
        for key, switches in _SAME_LAYERS.items():
            on = [switch for switch in switches if getattr(config, switch)]
            if getattr(self, key, None) and on:
                off = ", ".join(f"{switch}: false" for switch in switches)
                raise ValueError(
                    f"`{key}` is {getattr(self, key)!r}, and LigerTrainerPlugin has {' and '.join(on)} on, for the "
                    f"same layers. Remove `{key}` and its plug-in, or set `liger_kernel_config: {{{off}}}`."
                )
        return self


class LigerTrainerPlugin(BasePlugin):
    """Applies the kernels to each model that axolotl loads, adapters included, and prints the report once."""

    def __init__(self) -> None:
        super().__init__()
        self._reports: weakref.WeakKeyDictionary[nn.Module, KernelReport] = weakref.WeakKeyDictionary()

    def get_input_args(self) -> str:
        """The class of the plug-in's keys, which axolotl imports by its path."""
        return f"{__name__}.LigerTrainerArgs"

    def register(self, cfg: dict[str, Any]) -> None:
        """Switches axolotl's LoRA kernels off if the config says nothing of them, where axolotl would choose them.

        They run past the layers' own forwards, and so past ours.

        Args:
            cfg: The config as it was written; changed in place.
        """
        unsaid = cfg.get("adapter") in ("lora", "qlora") and all(cfg.get(key) is None for key in _LORA_KEYS)
        if unsaid and KernelConfig.parse(cfg.get("liger_kernel_config")).lora:
            cfg.update(dict.fromkeys(_LORA_KEYS, False))
            logger.warning("LigerTrainerPlugin: LoRA runs on the kernels of liger_trainer, not on axolotl's.")

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        """Applies the kernels, after adapters and axolotl's patches.

        Args:
            cfg: The validated config.
            model: The model, a PEFT model with adapters; each model of a run, such as DPO's reference, comes here.

        Raises:
            ValueError: with `strict_kernels`, if a kernel cannot be applied.
        """
        config: Mapping[str, Any] | None = cfg.liger_kernel_config
        self._reports[model] = apply_liger_kernel(model, config, strict=bool(cfg.strict_kernels))

    def add_callbacks_pre_trainer(self, cfg: Any, model: nn.Module) -> list[TrainerCallback]:
        """The callback that prints the report of `model`, the one that is trained, when training begins."""
        return [KernelReportCallback(self._reports[model])] if model in self._reports else []
