"""What a run was started with: arguments, versions, device."""

from __future__ import annotations

import dataclasses
import enum
import platform
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from liger_trainer._version import __version__
from liger_trainer.compat.private import installed_version
from liger_trainer.configs.flags import copies_without_waiting

_PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers")
_EMPTY: tuple[Any, ...] = (None, [], {})
_SECRETS = ("token", "key", "password", "secret")
_HIDDEN = "(not shown)"


def changed_arguments(args: TrainingArguments) -> list[tuple[str, object]]:
    """Name and value of each argument that is not the default of its class; tokens and keys are not shown."""
    values = args.to_dict()
    given = [field for field in dataclasses.fields(args) if field.init and getattr(args, field.name) not in _EMPTY]
    changed = [field.name for field in given if not _is_default(args, field, values[field.name])]
    return [(name, _without_secrets(name, values[name])) for name in changed]


def environment(args: TrainingArguments) -> list[tuple[str, object]]:
    """Device, processes, and versions of this package and those that it works with."""
    versions = [(name, installed_version(name) or "not installed") for name in _PACKAGES]
    return [
        ("device", _device(args.device)),
        ("processes", args.world_size),
        ("system", platform.platform()),
        ("python", platform.python_version()),
        ("liger-trainer", __version__),
        *versions,
    ]


def _is_default(args: TrainingArguments, field: dataclasses.Field[Any], value: Any) -> bool:
    if field.name == "accelerator_config":  # the default, None, stands for this one
        return value.items() <= AcceleratorConfig(non_blocking=copies_without_waiting(args)).to_dict().items()
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return value == (default.value if isinstance(default, enum.Enum) else default)


def _without_secrets(name: str, value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_secrets(str(key), inner) for key, inner in value.items()}
    return _HIDDEN if isinstance(value, str) and name.lower().endswith(_SECRETS) else value


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    backend = torch.get_device_module(device)
    return backend.get_device_name(device) if hasattr(backend, "get_device_name") else str(device)
