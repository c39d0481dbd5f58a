"""``liger-trainer inspect``: which kernels a model would get, from its configuration alone."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from liger_trainer.configs.kernel_config import KernelConfig
from liger_trainer.errors import UserError
from liger_trainer.patching.apply import apply_liger_kernel
from liger_trainer.patching.report import KernelReport
from liger_trainer.recipe.file import find_recipe, read_recipe, shipped_recipes
from liger_trainer.recipe.model import config_of_values, model_class, published_config, read_config


def inspect(arguments: Namespace) -> int:
    """Prints the kernel report of ``arguments.model``; returns the exit code."""
    try:
        print(kernel_report(arguments.model, arguments.liger_kernel_config, arguments.trust_remote_code))
    except ValueError as error:  # of a kernel switch, or of a model that cannot be built
        raise UserError(str(error)) from error
    return 0


def kernel_report(
    model: str, kernel_config: str | dict[str, Any] | None = None, trust_remote_code: bool = False
) -> KernelReport:
    """The report that `apply_liger_kernel` gives for a model built without its weights.

    Args:
        model: A Hub id, a model folder, a ``config.json``, or a recipe.
        kernel_config: Switches by component, as in ``liger_kernel_config``.
        trust_remote_code: Whether to run code that comes with the model.

    Raises:
        RecipeError: if there is no such model.
    """
    switches = KernelConfig.parse(kernel_config)
    config = model_config(model, trust_remote_code)
    with torch.device("meta"):
        built = model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    # The remarks are about missing weights, which are missing on purpose here.
    return dataclasses.replace(apply_liger_kernel(built, switches), remarks=())


def model_config(model: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model given by a Hub id, a folder, a ``config.json`` or a recipe."""
    path = Path(model)
    if path.suffix in (".yaml", ".yml") or (model in shipped_recipes() and not path.exists()):
        source = find_recipe(model)
        values = {**read_recipe(source), "trust_remote_code": trust_remote_code}
        return config_of_values(values, source, packaged=True)
    return published_config(model) or read_config(model, "The model", trust_remote_code=trust_remote_code)
