"""``liger-trainer train``: runs a recipe here, or through `accelerate launch` for several processes."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liger_trainer.tools.cli.argument_types import positive
from liger_trainer.tools.cli.run_recipe import prepare_environment, run_recipe_file


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "train",
        help="train a recipe",
        description="Trains a recipe. Every key of the recipe is also an option, which wins over the file; "
        "`liger-trainer keys TRAINER` lists them.",
        usage="liger-trainer train RECIPE [--smoke] [--accelerate_config NAME] [--num_processes N] [--key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a few offline steps of a tiny random model of the same family, on generated data",
    )
    parser.add_argument(
        "--accelerate_config",
        metavar="NAME",
        help="single_gpu, ddp, fsdp1, fsdp2, zero2, zero3, or the path of an accelerate configuration",
    )
    parser.add_argument(
        "--num_processes",
        type=positive,
        metavar="N",
        help="processes to start; default: one for each GPU of this machine",
    )
    parser.set_defaults(function=train)


def train(arguments: Namespace, options: Sequence[str]) -> int:
    """Trains ``arguments.recipe`` with the `options` that win over it.

    One process runs in place. With ``--accelerate_config``, with a configuration in the recipe and a GPU, or on a
    machine with several GPUs, `accelerate launch` replaces this process. The recipe is read and checked first, so that
    a mistake is reported once and not by every rank.

    Returns:
        The exit code of `run_recipe_file`.

    Raises:
        RecipeError: for a mistake in the recipe or the configuration, before anything is launched.
    """
    prepare_environment()
    from liger_trainer.recipe.file import find_recipe, read_recipe
    from liger_trainer.recipe.load import check_values

    flags = [flag for flag in ("--smoke", "--debug") if getattr(arguments, flag[2:])]
    path = find_recipe(arguments.recipe)
    config = arguments.accelerate_config or _config_of(path, arguments.smoke)
    command = launch_command(path, [*options, *flags], config, arguments.num_processes)
    if command is None:
        return run_recipe_file(str(path), [*options, *flags])
    check_values(read_recipe(path), options, path)
    print("liger-trainer:", " ".join(command[1:]), file=sys.stderr, flush=True)
    sys.stdout.flush()
    return os.execv(command[0], command)  # does not return


def _config_of(recipe: Path, smoke: bool) -> str | None:
    """The accelerate configuration of a recipe; None for a smoke run, in a launched process, or without GPUs."""
    from liger_trainer.recipe.file import accelerate_config, read_recipe

    name = read_recipe(recipe).get("accelerate_config")
    if name is not None:
        accelerate_config(name)
    return None if smoke or "RANK" in os.environ or not count_gpus() else name


def launch_command(
    recipe: Path, options: Sequence[str], config: str | None, num_processes: int | None
) -> list[str] | None:
    """The `accelerate launch` command line, or None if one process in place is enough."""
    import torch

    from liger_trainer.recipe.file import accelerate_config

    gpus = count_gpus()
    if config is None:
        if "RANK" in os.environ or max(gpus, num_processes or 1) <= 1:
            return None
        config = "single_gpu" if num_processes == 1 else "ddp"
    file = accelerate_config(config)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    if num_processes is None and Path(config) != file and config != "single_gpu":
        num_processes = max(gpus, 1)
    if not gpus and not torch.accelerator.is_available():
        _check_for_cpu(config, file)
        command += ["--mixed_precision", "no"]  # the file's is for GPUs; the recipe's `bf16` still counts
    if config == "single_gpu" and gpus > 1:
        command += ["--gpu_ids", "0"]  # a process that sees them all would run nn.DataParallel
    if num_processes is not None:
        command += ["--num_processes", str(num_processes)]
    return [*command, "-m", "liger_trainer", str(recipe), *options]


def _check_for_cpu(config: str, file: Path) -> None:
    """Refuses a configuration that splits the model: on a CPU, DeepSpeed hangs and FSDP does not split."""
    import yaml

    from liger_trainer.recipe.file import RecipeError

    kind = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("distributed_type", "NO")
    if str(kind) not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise RecipeError(
            f"`--accelerate_config {config}` splits the model over GPUs ({kind}), but there is no GPU here "
            "(`liger-trainer doctor` says why); use `--accelerate_config ddp`, or leave it out."
        )


def count_gpus() -> int:
    """GPUs that this process sees; counting does not initialise them."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
