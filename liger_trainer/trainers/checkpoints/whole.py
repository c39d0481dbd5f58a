"""Checkpoints that are whole or not there: one is written in a folder of its own and renamed once all of it is."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import WHOLE_CHECKPOINTS

if TYPE_CHECKING:
    _Base = Trainer
else:
    _Base = object

logger = logging.getLogger("liger_trainer")

rotate_checkpoints, *_ = require(WHOLE_CHECKPOINTS)

STAGING = "_incomplete"
"""The folder in ``output_dir`` where a checkpoint is written. What is in it when nothing runs may be deleted, once
`finish_interrupted` has taken out what is whole."""

_WHOLE, _REPLACED = ".whole", ".replaced"  # what is left of a checkpoint is its name

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_ROOM_WORDS = (
    "PytorchStreamWriter failed writing",  # torch.save, by where it fails: at a file's content or its end
    "iostream error",
    ". unexpected pos ",
    *(f"(os error {number})" for number in _NO_ROOM),  # safetensors
)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first, once `finish_interrupted` has run.

    The Trainer writes ``trainer_state.json`` last, so a checkpoint of a stock trainer whose writing was cut short has
    none.
    """
    finish_interrupted(folder)
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if step_of(path) < 0 or not path.is_dir():
            continue
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            logger.warning("%s is not complete (its writing was cut short); it is not used.", path)
            continue
        found.append(path)
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step that a checkpoint's name says; -1 for a name that is no checkpoint's."""
    number = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", checkpoint.name)
    return -1 if number is None else int(number.group(1))


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the text says where, and what room there was."""


def room_in(folder: Path) -> str:
    """How much room a run's folder has, and how to make some: a new checkpoint is written before an old one goes."""
    whole = folder.absolute()
    free = shutil.disk_usage(next(path for path in (whole, *whole.parents) if path.exists())).free
    room = f"{free / 2**20:,.1f} MiB were free there"
    checkpoints = complete_checkpoints(folder)
    if not checkpoints:
        return room
    oldest = checkpoints[0]
    size = f"{sum(path.stat().st_size for path in oldest.rglob('*') if path.is_file()) / 2**20:,.1f} MiB"
    if len(checkpoints) == 1:  # without it there is nothing to go on from
        return f"{room}, beside the only checkpoint, {str(oldest)!r} ({size})"
    return f"{room}; delete an old checkpoint, of which {str(oldest)!r} ({size}) is the oldest"


def out_of_room(error: BaseException) -> bool:
    """Whether the error of any library says that nothing more could be written; checkpoint formats have their own."""
    return getattr(error, "errno", None) in _NO_ROOM or any(words in str(error) for words in _NO_ROOM_WORDS)


class WholeCheckpointsMixin(_Base):
    """Put before a Trainer: ``checkpoint-N`` appears under its name only when every process has written its part.

    So a process that is killed while it saves leaves the checkpoints before it, and none that is half written; and
    older ones are deleted (`save_total_limit`) only after that. Against a machine that loses power, whose disk may
    forget what was written, this is no help.
    """

    _saving = False

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._saving else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._saving:  # the upload reads the folder in the background, and must not see it renamed
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staged = run_dir / STAGING / final.name
        first_of_node = self.args.local_process_index == 0
        if first_of_node:
            finish_interrupted(run_dir)
            shutil.rmtree(staged.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self._saving = True
        try:
            with _told_where(final, staged.parent):
                super()._save_checkpoint(model, trial)
        finally:
            self._saving = False
        self._name_the_best(run_dir, staged)
        self.accelerator.wait_for_everyone()
        if first_of_node:
            put_in_place(staged, final)
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(final))
        if self.args.should_save:
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _name_the_best(self, run_dir: Path, staged: Path) -> None:
        """Puts into the state the name that the best checkpoint has, or is about to have."""
        if self.args.save_strategy == SaveStrategy.NO or not self.state.best_global_step:
            return
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if best.name != staged.name and not best.exists():
            return
        self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))


def put_in_place(staged: Path, final: Path) -> None:
    """Gives a checkpoint that is whole its name, and removes the folder it was written in.

    Called by one process of every machine. Where they share the folder, renaming gives the checkpoint to one of them.
    """
    whole = staged.with_name(staged.name + _WHOLE)
    try:
        staged.rename(whole)
    except FileNotFoundError:
        return
    if final.exists():  # of the same step, from a run before this one
        final.rename(staged.with_name(staged.name + _REPLACED))
    whole.rename(final)
    shutil.rmtree(staged.parent, ignore_errors=True)


def finish_interrupted(folder: Path) -> None:
    """Gives checkpoints in `folder` their names that were whole when their process was killed over giving them.

    Any number of processes may call this at once.
    """
    for whole in (folder / STAGING).glob(f"{PREFIX_CHECKPOINT_DIR}-*{_WHOLE}"):
        final = folder / whole.name.removesuffix(_WHOLE)
        if not final.exists():  # else the one that it was to replace, which is whole too
            with contextlib.suppress(FileNotFoundError):  # another process was first
                whole.rename(final)


@contextlib.contextmanager
def _told_where(final: Path, staging: Path) -> Iterator[None]:
    """Around the writing of a checkpoint: what fails is told with its place and the room there, and is cleared away."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)  # errors of the network are OSErrors too, but have none
        if number is None and not out_of_room(error):
            raise
        room = room_in(final.parent)
        shutil.rmtree(staging, ignore_errors=True)
        raise CheckpointWriteError(
            number or errno.ENOSPC,
            f"{final} could not be written ({str(error).splitlines()[0]}): {room}. What was written of it has been "
            "removed; the checkpoints before it are as they were.",
        ) from error
