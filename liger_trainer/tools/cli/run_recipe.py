"""Runs a recipe in this process, which a launcher may have started as one of several."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import MutableMapping, Sequence
from typing import Any


def run_yaml(namespace: MutableMapping[str, Any]) -> bool:
    """Runs the recipe that is being executed as Python, and exits.

    A recipe is YAML that is also valid Python, so ``accelerate launch recipe.yaml`` executes it as a script. A data
    loader's worker process executes it again under another name; then nothing runs, and the lines after this call are
    plain annotations.

    Args:
        namespace: The recipe's ``globals()``.

    Returns:
        False, if the file is not the main program.
    """
    namespace.update(true=True, false=False, null=None)  # YAML's constants, which the following lines use as names
    if namespace.get("__name__") != "__main__":
        return False
    sys.exit(run_recipe_file(namespace["__file__"], sys.argv[1:]))


def run_recipe_file(name: str, arguments: Sequence[str]) -> int:
    """Trains a recipe in this process.

    Args:
        name: Path of the recipe, or the name of a shipped one.
        arguments: ``--smoke``, ``--debug`` and ``--key value`` options.

    Returns:
        The exit code: 0, 1 if `non_finite` has stopped the training, 2 after an error that the user can correct, or
        128 plus the signal's number after Ctrl-C (130), SIGTERM (143) or SIGHUP (129).
    """
    prepare_environment()
    from liger_trainer.tools.cli.doctor import unmet_requirement
    from liger_trainer.tools.cli.ranks import rank, recorded

    unmet = unmet_requirement()
    if unmet is not None:
        if rank() == 0:
            print(f"liger-trainer: {unmet}", file=sys.stderr)
        return 2
    return recorded(_run)(name, arguments) or 0


def prepare_environment() -> None:
    """Sets environment variables that libraries read when they are imported; the user's own settings win.

    By default an idle OpenMP thread spins. On busy cores it takes time from the thread it waits for: a tiny model,
    whose operations take microseconds, trains up to ten times slower.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def prepare_libraries(offline: bool = False) -> None:
    """[`prepare_environment`], and what else is set before the first import of transformers, TRL and datasets.

    Args:
        offline: Whether nothing may be downloaded.
    """
    prepare_environment()
    # Newer versions of transformers call it activation_checkpointing; every supported version knows the older name.
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
    if offline:
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import torch

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # TRL imports DeepSpeed, which would warn that it found no GPU


def _run(name: str, arguments: Sequence[str]) -> int:
    options = [argument for argument in arguments if argument not in ("--smoke", "--debug")]
    debug = "--debug" in arguments
    prepare_libraries(offline="--smoke" in arguments)
    from liger_trainer.callbacks.non_finite import NonFiniteError
    from liger_trainer.callbacks.stop_on_signal import StoppedBySignal
    from liger_trainer.recipe import RecipeError, load_recipe
    from liger_trainer.recipe.file import TrainingError
    from liger_trainer.tools.cli.ranks import leave_process_group, rank

    try:
        recipe = load_recipe(name, options, smoke="--smoke" in arguments)
        from liger_trainer.recipe.run import run_recipe

        run_recipe(recipe)
    except TrainingError as error:
        if debug:
            raise
        print(f"liger-trainer: {f'rank {rank()}: ' if 'RANK' in os.environ else ''}{error}", file=sys.stderr)
        return 2
    except (RecipeError, NonFiniteError) as error:
        if debug:
            raise
        if rank() == 0:
            print(f"liger-trainer: {error}", file=sys.stderr)
        leave_process_group()
        return 2 if isinstance(error, RecipeError) else 1
    except KeyboardInterrupt as error:
        if debug:
            raise
        stopped = isinstance(error, StoppedBySignal)
        if rank() == 0:
            again = "the same command with `--resume_from_checkpoint true` continues from the last checkpoint"
            print(f"\nliger-trainer: {error if stopped else 'interrupted'}; {again}.", file=sys.stderr)
        leave_process_group()
        return 128 + (error.number if isinstance(error, StoppedBySignal) else signal.SIGINT)
    leave_process_group()
    return 0
