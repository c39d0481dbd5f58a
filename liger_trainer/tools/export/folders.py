"""Folders that a command writes: whole or not at all, and never over what is there."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from liger_trainer.errors import UserError
from liger_trainer.recipe.file import first_line
from liger_trainer.trainers.checkpoints.whole import out_of_room

_UNFINISHED = ".unfinished"


def default_folder(run: Path, name: str) -> Path:
    """The folder `name` in that of a run; a checkpoint's own folder may be deleted by `save_total_limit`."""
    if run.resolve().name.startswith("checkpoint-"):
        return run.resolve().parent / f"{name}-{run.resolve().name}"
    return run / name


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `folder` at the end of the context, and is removed after an error.

    An empty folder stays the one that it is, such as a link, the working directory or a disk of its own: what was
    written is moved into it.

    Args:
        folder: An empty folder, or one that does not exist.

    Raises:
        UserError: If `folder` is not empty, or cannot be created or written.
    """
    unfinished = _unfinished(folder)
    try:
        yield unfinished
        if unfinished.parent != folder:
            unfinished.rename(folder)
        else:
            for each in [*unfinished.iterdir()]:
                each.rename(folder / each.name)
    except Exception as error:
        if not out_of_room(error):
            raise
        raise UserError(f"{str(folder)!r} could not be written: {first_line(error)} Give another folder.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _unfinished(folder: Path) -> Path:
    """A new folder beside `folder`, or inside if that exists, in which is written what is not complete."""
    unfinished = folder.absolute().with_name(f"{folder.absolute().name}{_UNFINISHED}")
    if folder.exists():
        if not folder.is_dir() or any(each.name != _UNFINISHED for each in folder.iterdir()):
            raise UserError(f"`--output_dir` {str(folder)!r} exists and is not an empty folder; give another one.")
        unfinished = folder / _UNFINISHED
    try:
        unfinished.mkdir(parents=True)
    except FileExistsError:
        raise UserError(
            f"{str(unfinished)!r} is left of a command that was interrupted, or that is running; delete it, or give "
            "another `--output_dir`."
        ) from None
    except OSError as error:
        raise UserError(f"{str(unfinished)!r} cannot be created: {error.strerror}; give an `--output_dir`.") from error
    return unfinished
