"""``output_dir``: the user's files are never overwritten, and a killed run continues from its last checkpoint."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from accelerate import PartialState

from liger_trainer.recipe.file import RecipeError, TrainingError, first_line
from liger_trainer.recipe.load import Recipe
from liger_trainer.trainers.checkpoints.output_lock import LOCK, owned
from liger_trainer.trainers.checkpoints.whole import CheckpointWriteError, complete_checkpoints, out_of_room, room_in

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def owned_folder(recipe: Recipe) -> Iterator[None]:
    """Creates ``output_dir`` if necessary, and keeps other runs from writing to it.

    A folder that it has created and that is still empty at the end, as after an error in the recipe, is removed.

    Raises:
        RecipeError: if another run is writing there, or the folder cannot be created or written to.
    """
    folder = Path(str(recipe.training.output_dir))
    created = False
    try:
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"`output_dir` is {str(folder)!r}, which is a file; give a folder.")
        created = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except RecipeError:
        raise
    except (OSError, ValueError) as error:  # a name too long, no permission; a NUL in the name
        raise RecipeError(
            f"`output_dir` {str(folder)!r} cannot be created: {getattr(error, 'strerror', error)}; give another one."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RecipeError(f"`output_dir` {str(folder)!r} cannot be written to; give another one.")
    with contextlib.ExitStack() as held:
        if created:
            held.callback(_remove_empty, folder)
        try:
            held.enter_context(owned(folder))
        except BlockingIOError as error:
            raise RecipeError(f"`output_dir`: {error}. Wait for it, end it, or give another `--output_dir`.") from error
        yield


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty, or another process has removed it
        folder.rmdir()


def prepare_output_dir(recipe: Recipe) -> str | None:
    """Finds the checkpoint to resume from, and refuses a folder with other files.

    Returns:
        The checkpoint to resume from, or None to start from the beginning. ``resume_from_checkpoint: true`` takes the
        last complete checkpoint in ``output_dir``, or None if there is none yet.

    Raises:
        RecipeError: if ``output_dir`` is not empty and the recipe asks neither to resume nor to overwrite, or if the
            checkpoint to resume from is not a checkpoint.
    """
    state = PartialState()
    folder = Path(str(recipe.training.output_dir))
    asked: Any = recipe.training.resume_from_checkpoint
    asked = {"true": True, "false": None, "": None}.get(str(asked).lower(), asked)
    resume = None if asked is None else _resume(asked, folder)
    if asked is None and folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
        if not recipe.recipe.overwrite_output_dir:
            raise RecipeError(
                f"`output_dir` {str(folder)!r} is not empty, and nothing in it is overwritten. Add "
                "`--resume_from_checkpoint true` to continue the run in it, `--output_dir` with another folder, or "
                "`--overwrite_output_dir true` to delete its checkpoints and start again."
            )
        state.wait_for_everyone()
        if state.is_main_process:
            for path in folder.glob("checkpoint-*"):
                if re.fullmatch(r"checkpoint-\d+", path.name):
                    shutil.rmtree(path)
    state.wait_for_everyone()  # no process writes before all have looked
    return resume


def _resume(asked: str | Literal[True], folder: Path) -> str | None:
    if asked is True:
        found = complete_checkpoints(folder)
        if not found:
            logger.warning("There is no complete checkpoint in %s yet; the run starts from the beginning.", folder)
            return None
        logger.warning("Resuming from %s.", found[-1])
        return str(found[-1])
    if not (Path(asked) / "trainer_state.json").is_file():
        raise RecipeError(
            f"`resume_from_checkpoint` is {asked!r}, which is not a checkpoint (it has no trainer_state.json). "
            "Give one, or true for the last one in `output_dir`."
        )
    return asked


@contextlib.contextmanager
def room_for(folder: str) -> Iterator[None]:
    """Reports a full disk, in code that writes to `folder`, as one error that says how to continue.

    Raises:
        TrainingError: for every library's error of a full disk; checkpoint formats have errors of their own.
    """
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:
        if not out_of_room(error):
            raise
        room = (
            "" if isinstance(error, CheckpointWriteError) else f" `output_dir` is {folder!r}: {room_in(Path(folder))}."
        )
        raise TrainingError(
            f"Writing failed: {first_line(error)}{room} With more room, `--resume_from_checkpoint true` continues from "
            "the last complete checkpoint; with another `--output_dir`, its path does."
        ) from error
