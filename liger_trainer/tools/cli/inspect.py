"""``liger-trainer inspect``: which kernels a model would get, from its configuration alone."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from liger_trainer.patching.report import KernelReport


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "inspect",
        help="what would be accelerated in a model",
        description="Builds a model without its weights and shows which kernels it would get. Nothing is trained.",
    )
    parser.add_argument("model", metavar="MODEL", help="a Hub id, a model folder, a config.json, or a recipe")
    parser.add_argument(
        "--liger_kernel_config", metavar="JSON", help="switches by component, such as '{\"rope\": false}'"
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    parser.set_defaults(function=lambda arguments, _: inspect(arguments))


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
    """The report that `apply_liger_kernel` gives for a model built without its weights."""
    import torch

    from liger_trainer.configs.kernel_config import KernelConfig
    from liger_trainer.patching.apply import apply_liger_kernel
    from liger_trainer.recipe.model import model_class

    switches = KernelConfig.parse(kernel_config)
    config = model_config(model, trust_remote_code)
    with torch.device("meta"):
        built = model_class(config).from_config(config, trust_remote_code=trust_remote_code)
    # The remarks are about missing weights, which are missing on purpose here.
    return dataclasses.replace(apply_liger_kernel(built, switches), remarks=())


def model_config(model: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model given by a Hub id, a folder, a ``config.json`` or a recipe."""
    from liger_trainer.recipe.file import find_recipe, read_recipe, shipped_recipes
    from liger_trainer.recipe.model import config_of_values, published_config, read_config

    path = Path(model)
    if path.suffix in (".yaml", ".yml") or (model in shipped_recipes() and not path.exists()):
        source = find_recipe(model)
        values = {**read_recipe(source), "trust_remote_code": trust_remote_code}
        return config_of_values(values, source, packaged=True)
    return published_config(model) or read_config(model, "The model", trust_remote_code=trust_remote_code)
