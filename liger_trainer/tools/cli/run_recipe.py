"""Runs recipes, as a command or as a script, alone or as one of several ranks."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from liger_trainer.recipe import Recipe

LAUNCHER_SECONDS = 5.0
"""Time for a launcher to end a process whose peer has died; torchrun looks ten times a second."""


def recorded(run: Callable[[str, Sequence[str]], int]) -> Callable[[str, Sequence[str]], int | None]:
    """Wraps `run` so that the launcher's summary shows the traceback of the rank that failed first, and no other.

    When a rank dies, the collectives of all others fail within microseconds. The launcher takes the earliest error that
    it finds for the root cause, so the other ranks wait here until it ends them. Those on other hosts, of which it
    knows nothing, end by themselves, with a line in place of a traceback: the cause is elsewhere.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    def wait_before_reporting_a_lost_peer(name: str, arguments: Sequence[str]) -> int:
        try:
            return run(name, arguments)
        except Exception as error:
            if not lost_a_peer(error):
                raise
            time.sleep(LAUNCHER_SECONDS)
            if "--debug" in arguments:
                raise
            what = re.sub(r"^(\[.*?\] )+", "", str(error).strip().splitlines()[0]).split(". ")[0].rstrip(".")
            print(
                f"liger-trainer: rank {rank()} on {socket.gethostname()}: another process has ended, or no longer "
                f"answers ({what}). The same command with `--resume_from_checkpoint true` continues from the last "
                "checkpoint.",
                file=sys.stderr,
                flush=True,
            )
            return 1

    return record(wait_before_reporting_a_lost_peer)


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because a peer died: NCCL has an error class for it, gloo only its source path."""
    import torch

    if not torch.distributed.is_available():
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo/transport/" in str(error)


def rank() -> int:
    """The rank of this process, as its launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def first_of_host() -> bool:
    """Whether this process speaks for its host, which has files and a log of its own."""
    return int(os.environ.get("LOCAL_RANK", rank())) == 0


def leave_process_group() -> None:
    """Leaves the process group, if there is one. Every process must call this: leaving may wait for the others."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


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
    try:
        prepare_environment()
        quiet_bitsandbytes()
        from liger_trainer.tools.cli.doctor import unmet_requirement

        unmet = unmet_requirement()
        if unmet is not None:
            if first_of_host():
                print(f"liger-trainer: {unmet}", file=sys.stderr)
            return 2
        return recorded(_run)(name, arguments) or 0
    except KeyboardInterrupt:  # before anything was loaded; later ones end in `_run`
        return interrupted()


def interrupted(what: str = "interrupted") -> int:
    """Says in one line what has ended the command; returns the exit code of Ctrl-C."""
    if first_of_host():
        print(f"\nliger-trainer: {what}.", file=sys.stderr)
    return 128 + signal.SIGINT


def prepare_environment() -> None:
    """Sets environment variables that libraries read when they are imported; the user's own settings win.

    By default an idle OpenMP thread spins. On busy cores it takes time from the thread it waits for: a tiny model,
    whose operations take microseconds, trains up to ten times slower.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & set(os.environ):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def quiet_bitsandbytes() -> None:
    """Silences the line of bitsandbytes, which PEFT imports, about a kernel for generation on a CPU."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def prepare_libraries(offline: bool = False) -> None:
    """[`prepare_environment`], and what else is set before the first import of transformers, TRL and datasets."""
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

    recipe = None
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
        if first_of_host():
            print(f"liger-trainer: {error}", file=sys.stderr)
        leave_process_group()
        return 2 if isinstance(error, RecipeError) else 1
    except KeyboardInterrupt as error:
        if debug:
            raise
        stopped = isinstance(error, StoppedBySignal)
        interrupted(f"{error if stopped else 'interrupted'}{_how_to_go_on(recipe)}")
        leave_process_group()
        return 128 + (error.number if isinstance(error, StoppedBySignal) else signal.SIGINT)
    leave_process_group()
    return 0


def _how_to_go_on(recipe: Recipe | None) -> str:
    """The end of a sentence on a run that was interrupted: how it continues, if it has a checkpoint."""
    from liger_trainer.trainers.checkpoints.whole import complete_checkpoints

    if recipe is None or not complete_checkpoints(Path(str(recipe.training.output_dir))):
        return ", before the first checkpoint"
    return "; the same command with `--resume_from_checkpoint true` continues from the last checkpoint"


def quiet_libraries() -> None:
    """To be called before the first import of a library that reads environment variables."""
    prepare_libraries()
    if not sys.stderr.isatty():
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
