"""The parts of four frameworks that load a plug-in and call it, for where the frameworks are not installed.

Each is written after the release and the files that its docstring names, and does what those do for a plug-in alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, model_validator

LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")


class Config(dict):
    """axolotl 0.19.0, `utils/dict.py`: keys are attributes too, and those that are not there are None."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class BasePlugin:
    """axolotl 0.19.0, `integrations/base.py`: the methods that a plug-in may leave out return nothing."""


def load_plugin(name: str) -> Any:
    """axolotl 0.19.0, `integrations/base.py`: an instance of the class with this path."""
    module, plugin = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), plugin)()


class AxolotlInputConfig(BaseModel):
    """axolotl 0.19.0, `utils/schemas/config.py`: the keys for kernels, and the check that turns those of LoRA on."""

    adapter: str | None = None
    chunked_cross_entropy: bool | None = None
    lora_mlp_kernel: bool | None = None
    lora_qkv_kernel: bool | None = None
    lora_o_kernel: bool | None = None
    lora_embedding_kernel: bool | None = None
    tiled_mlp: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def check_auto_enable_lora_kernels(cls, data: Any) -> Any:
        if data.get("adapter") in ("lora", "qlora") and all(data.get(key) is None for key in LORA_KERNELS):
            data.update(dict.fromkeys(LORA_KERNELS, True))
        return data


class LigerArgs(BaseModel):
    """axolotl 0.19.0, `integrations/liger/args.py`: some keys of axolotl's own plug-in for Liger."""

    liger_rope: bool | None = None
    liger_rms_norm: bool | None = None
    liger_glu_activation: bool | None = None
    liger_fused_linear_cross_entropy: bool | None = None


class CutCrossEntropyArgs(BaseModel):
    """axolotl 0.19.0, `integrations/cut_cross_entropy/args.py`: on wherever the plug-in is."""

    cut_cross_entropy: bool | None = True


def validate(config: Config, *plugins: Any) -> Config:
    """axolotl 0.19.0, `integrations/config.py` and `utils/config/__init__.py`: a schema with all classes."""
    bases = []
    for plugin in plugins:
        module, name = plugin.get_input_args().rsplit(".", 1)
        bases.append(getattr(importlib.import_module(module), name))
    schema = type("AxolotlInputConfig", (AxolotlInputConfig, *bases), {})
    return Config(schema(**config).model_dump(exclude_none=True))


class KernelPlugin:
    """LLaMA-Factory 0.9.5, `v1/utils/plugin.py`: a registry of functions by the name of the plug-in."""

    _registry: ClassVar[dict[str, Callable]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def register(self) -> Callable:
        def decorator(function: Callable) -> Callable:
            self._registry[self.name] = function
            return function

        return decorator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._registry[self.name](*args, **kwargs)


def get_logger(name: str) -> Any:
    """LLaMA-Factory 0.9.5, `v1/utils/logging.py`: loggers below its own, with `info_rank0`."""
    logger: Any = logging.getLogger(f"llamafactory.{name}")
    logger.info_rank0 = logger.info
    return logger


def import_external_file(path: Path) -> types.ModuleType:
    """ms-swift 4.6.0, `utils/utils.py`: runs a file of `--external_plugins` under a name of its own."""
    sys.path.insert(0, str(path.parent))
    spec: Any = importlib.util.spec_from_file_location("_swift_external_0", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def import_external_libs(names: str | list[str]) -> None:
    """verl 0.9.1, `utils/import_utils.py`: imports the modules of `model.external_lib`."""
    for name in names if isinstance(names, list) else [names]:
        importlib.import_module(name)
