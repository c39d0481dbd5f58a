"""Where a run writes: nothing of the user's is overwritten, and a run that was killed goes on from where it was."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from liger_trainer.recipe import Recipe
from liger_trainer.recipe.file import RecipeError, TrainingError, first_line
from liger_trainer.trainers.checkpoints.output_lock import LOCK, owned
from liger_trainer.trainers.checkpoints.whole import CheckpointWriteError, complete_checkpoints, out_of_room, room_in

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def owned_folder(recipe: Recipe) -> Iterator[None]:
    """Makes ``output_dir``, where it is not there, and keeps other runs from writing there meanwhile.

    One that it has made and that stays empty, as after an error in the recipe, is removed.

    Raises:
        RecipeError: if another run is writing there, or nobody can.
    """
    folder = Path(str(recipe.training.output_dir))
    made = False
    try:
        if folder.exists() and not folder.is_dir():
            raise RecipeError(f"`output_dir` is {str(folder)!r}, which is a file; give a folder.")
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
    except RecipeError:
        raise
    except (OSError, ValueError) as error:  # a name too long, no permission; a NUL in the name
        raise RecipeError(
            f"`output_dir` {str(folder)!r} cannot be made: {getattr(error, 'strerror', error)}; give another one."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RecipeError(f"`output_dir` {str(folder)!r} cannot be written to; give another one.")
    with contextlib.ExitStack() as held:
        if made:
            held.callback(_remove_empty, folder)
        try:
            held.enter_context(owned(folder))
        except BlockingIOError as error:
            raise RecipeError(f"`output_dir`: {error}. Wait for it, end it, or give another `--output_dir`.") from error
        yield


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it holds something, or another process was first
        folder.rmdir()


def prepare_output_dir(recipe: Recipe) -> str | None:
    """Decides where the run starts from, and refuses a folder that holds something else.

    Returns:
        The checkpoint to resume from, or None to start at the beginning. ``resume_from_checkpoint: true`` takes the
        last complete checkpoint in ``output_dir``, and starts at the beginning where there is none yet.

    Raises:
        RecipeError: if ``output_dir`` is not empty and neither resuming nor overwriting was asked for, or if the
            checkpoint to resume from is not one.
    """
    from accelerate import PartialState

    state = PartialState()
    folder = Path(str(recipe.training.output_dir))
    resume = _resume(recipe, folder)
    wanted = recipe.training.resume_from_checkpoint not in (None, False, "false", "False", "")
    if not wanted and folder.exists() and any(path.name != LOCK for path in folder.iterdir()):
        if not recipe.recipe.overwrite_output_dir:
            raise RecipeError(
                f"`output_dir` {str(folder)!r} is not empty, and nothing in it is overwritten unasked. Add "
                "`--resume_from_checkpoint true` to go on with the run in it, `--output_dir` with another folder, or "
                "`--overwrite_output_dir true` to delete its checkpoints and start again."
            )
        state.wait_for_everyone()
        if state.is_main_process:
            for path in folder.glob("checkpoint-*"):
                if re.fullmatch(r"checkpoint-\d+", path.name):
                    shutil.rmtree(path)
    state.wait_for_everyone()  # nobody writes before everybody has looked
    return resume


def _resume(recipe: Recipe, folder: Path) -> str | None:
    asked = recipe.training.resume_from_checkpoint
    if asked in (None, False, "false", "False", ""):
        return None
    if asked in (True, "true", "True"):
        found = complete_checkpoints(folder)
        if not found:
            logger.warning("There is no complete checkpoint in %s yet; the run starts at the beginning.", folder)
            return None
        logger.warning("Resuming from %s.", found[-1])
        return str(found[-1])
    if not (Path(asked) / "trainer_state.json").is_file():
        raise RecipeError(
            f"`resume_from_checkpoint` is {asked!r}, which is no checkpoint (it holds no trainer_state.json). "
            "Give one, or true for the last one in `output_dir`."
        )
    return asked


@contextlib.contextmanager
def room_for(folder: str) -> Iterator[None]:
    """Around what writes to `folder`: a disk without room is told as such, and how to make some.

    Raises:
        TrainingError: for any library's error that means so; the formats of checkpoints have errors of their own.
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
            f"Writing failed: {first_line(error)}{room} With more room, `--resume_from_checkpoint true` goes on from "
            "the last complete checkpoint; with another `--output_dir`, its path does."
        ) from error
