"""The command line: ``liger-trainer``, ``python -m liger_trainer`` and recipes that run themselves.

Everything heavy is imported when a command needs it, so that ``--help`` is quick.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import MutableMapping, Sequence
from typing import Any

__all__ = ["main", "run_recipe_file", "run_yaml"]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``liger-trainer``; returns the exit code (2 for what the user can put right)."""
    from liger_trainer.cli.parser import run

    return run(sys.argv[1:] if argv is None else list(argv))


def run_yaml(namespace: MutableMapping[str, Any]) -> bool:
    """Runs the recipe whose Python execution has reached this call, and exits.

    A recipe is YAML that is valid Python too, so `accelerate launch recipe.yaml` executes it as a script. A process
    that a data loader spawns executes it again under another name; then nothing runs and the rest of the file, plain
    annotations, is passed over.

    Args:
        namespace: The recipe's ``globals()``.

    Returns:
        False, where the file is not the main program.
    """
    namespace.update(true=True, false=False, null=None)  # YAML's words, met as Python in the lines that follow
    if namespace.get("__name__") != "__main__":
        return False
    sys.exit(run_recipe_file(namespace["__file__"], sys.argv[1:]))


def run_recipe_file(name: str, arguments: Sequence[str]) -> int:
    """Trains a recipe in this process, which a launcher may have started as one of several.

    Args:
        name: Path of the recipe, or the bare name of a shipped one.
        arguments: ``--smoke``, ``--debug`` and ``--key value`` options.

    Returns:
        The exit code: 0, 1 if `non_finite` has stopped the training, 2 after an error that the user can put right, or
        128 and the signal's number after Ctrl-C (130), SIGTERM (143) or SIGHUP (129).
    """
    prepare_environment()
    from liger_trainer.cli.doctor import unmet_requirement
    from liger_trainer.cli.ranks import rank, recorded

    unmet = unmet_requirement()
    if unmet is not None:
        if rank() == 0:
            print(f"liger-trainer: {unmet}", file=sys.stderr)
        return 2
    return recorded(_run_recipe_file)(name, arguments) or 0


def prepare_environment() -> None:
    """Sets what libraries read from the environment when they are imported; what the user has set stays.

    By default an OpenMP thread that waits for work spins. On busy cores it keeps the thread it waits for from running:
    a tiny model, whose every operation is microseconds of parallel work, trains up to ten times slower.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def _run_recipe_file(name: str, arguments: Sequence[str]) -> int:
    options = [argument for argument in arguments if argument not in ("--smoke", "--debug")]
    debug = "--debug" in arguments
    # Newer transformers call it activation_checkpointing; this is the name that every supported version knows.
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
    if "--smoke" in arguments:  # before the first import of a library that reads them
        os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

    import torch

    from liger_trainer.callbacks.non_finite import NonFiniteError
    from liger_trainer.callbacks.stop_on_signal import StoppedBySignal
    from liger_trainer.cli.ranks import leave_process_group, rank
    from liger_trainer.recipe import load_recipe
    from liger_trainer.recipe.file import RecipeError, TrainingError

    if not torch.accelerator.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # TRL imports DeepSpeed, which would warn that it found no GPU
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
            again = "the same command with `--resume_from_checkpoint true` goes on from the last checkpoint"
            print(f"\nliger-trainer: {error if stopped else 'interrupted'}; {again}.", file=sys.stderr)
        leave_process_group()
        return 128 + (error.number if isinstance(error, StoppedBySignal) else signal.SIGINT)
    leave_process_group()
    return 0
