"""``liger-trainer train``: runs a recipe here, or through `accelerate launch` where several processes are wanted."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from liger_trainer.cli.parser import complain


def train(arguments: Namespace, options: Sequence[str]) -> int:
    """Trains ``arguments.recipe`` with the `options` that win over it.

    One process runs in place. With ``--accelerate_config``, or one in the recipe and a GPU, or where this machine has
    several GPUs, `accelerate launch` takes over this process; the recipe is read and checked first, so that a mistake
    is told once and not by every rank.

    Returns:
        The exit code: 0, or 2 after an error that the user can put right.
    """
    from liger_trainer.cli import prepare_environment

    prepare_environment()
    from liger_trainer.recipe.file import RecipeError, find_recipe, read_recipe
    from liger_trainer.recipe.values import check_values

    flags = [flag for flag in ("--smoke", "--debug") if getattr(arguments, flag[2:])]
    try:
        path = find_recipe(arguments.recipe)
        config = arguments.accelerate_config or _config_of(path, arguments.smoke)
        command = launch_command(path, [*options, *flags], config, arguments.num_processes)
        if command is not None:
            check_values(read_recipe(path), options, path)
    except RecipeError as error:
        if arguments.debug:
            raise
        return complain(error)
    if command is None:
        from liger_trainer.cli import run_recipe_file

        return run_recipe_file(str(path), [*options, *flags])
    print("liger-trainer:", " ".join(command[1:]), file=sys.stderr, flush=True)
    sys.stdout.flush()
    return os.execv(command[0], command)  # does not come back


def _config_of(recipe: Path, smoke: bool) -> str | None:
    """The accelerate configuration that a recipe names, where it is to be followed: in a launched process it was.

    Raises:
        RecipeError: if there is none of that name, also where it would not be followed.
    """
    from liger_trainer.recipe.file import accelerate_config, read_recipe

    name = read_recipe(recipe).get("accelerate_config")
    if name is not None:
        accelerate_config(name)
    return None if smoke or "RANK" in os.environ or not count_gpus() else name


def launch_command(
    recipe: Path, options: Sequence[str], config: str | None, num_processes: int | None
) -> list[str] | None:
    """The `accelerate launch` command line, or None where one process in place does.

    Raises:
        RecipeError: if `config` is neither a shipped configuration nor a file, or one that needs GPUs where there are
            none.
    """
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
        command += ["--mixed_precision", "no"]  # that of the file is for GPUs; the recipe's own `bf16` still counts
    if config == "single_gpu" and gpus > 1:
        command += ["--gpu_ids", "0"]  # one process that saw them all would run nn.DataParallel
    if num_processes is not None:
        command += ["--num_processes", str(num_processes)]
    return [*command, "-m", "liger_trainer", str(recipe), *options]


def _check_for_cpu(config: str, file: Path) -> None:
    """Refuses a configuration that splits the model: on a CPU that hangs with DeepSpeed, and is not done with FSDP."""
    import yaml

    from liger_trainer.recipe.file import RecipeError

    kind = (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("distributed_type", "NO")
    if str(kind) not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise RecipeError(
            f"`--accelerate_config {config}` splits the model over GPUs ({kind}), and there is none here "
            "(`liger-trainer doctor` says why); take `--accelerate_config ddp`, or leave it out."
        )


def count_gpus() -> int:
    """GPUs this process sees; none of them is initialised by asking."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
