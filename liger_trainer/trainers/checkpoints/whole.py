"""Checkpoints that are complete or absent: each is written in a staging folder and renamed when it is complete.

A lock lets one run at a time write in an output folder.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import logging
import os
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import nn
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from liger_trainer.compat.private import require
from liger_trainer.compat.transformers import WHOLE_CHECKPOINTS

logger = logging.getLogger("liger_trainer")

LOCK = "_lock"
"""The file in ``output_dir`` that a run locks, and removes at its end. Uploads skip names that begin like this."""

_owned: dict[Path, int] = {}  # the thread of this process that owns a folder; a lock excludes other processes only


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Inside, `folder` belongs to this run. All processes of the run call this; the first one takes the lock.

    The system releases the lock when that process ends, however it ends. If the file system has no locks, there is a
    warning, and the run goes on without one. Inside another `owned` of the same folder this does nothing.

    Raises:
        BlockingIOError: in all processes, if another run owns the folder; nothing in it has been touched.
    """
    folder = folder.resolve()
    if _owned.get(folder) == threading.get_ident():
        yield
        return
    state = PartialState()
    file, refusal = _take(folder) if state.is_main_process else (None, None)
    (refusal,) = broadcast_object_list([refusal])
    if refusal is not None:
        raise BlockingIOError(refusal)
    _owned[folder] = threading.get_ident()
    try:
        yield
    finally:
        del _owned[folder]
        if file is not None:
            with contextlib.suppress(OSError):
                (folder / LOCK).unlink()  # before it is unlocked: nobody else can have locked it
            file.close()


def _take(folder: Path) -> tuple[IO[str] | None, str | None]:
    """The locked file (None if there are no locks), and why it could not be locked (None if it could)."""
    if folder in _owned:
        return None, f"another run of this process is writing in {str(folder)!r}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:
            file = (folder / LOCK).open("a+", encoding="utf-8")
            if not _lock(file):
                file.seek(0)
                who = file.read().strip() or "unknown"
                file.close()
                return None, f"another run ({who}) is writing in {str(folder)!r}"
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat()):
                    break
            file.close()  # it belonged to a run that has just ended, and removed the file
        file.truncate(0)
        since = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"pid {os.getpid()} on {socket.gethostname()}, since {since}\n")
        file.flush()
    except (OSError, ImportError) as error:
        logger.warning("%s cannot be locked (%s): nothing prevents another run from writing there.", folder, error)
        return None, None
    return file, None


def _lock(file: IO[str]) -> bool:
    """Whether the lock was free; raises an OSError if there are no locks."""
    import fcntl  # not on Windows

    try:
        # This lock belongs to the process; one by `flock` would live on in the workers of its data loader.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


rotate_checkpoints, *_ = require(WHOLE_CHECKPOINTS)

STAGING = "_incomplete"
"""The folder in ``output_dir`` where checkpoints are written. When nothing runs, its content may be deleted after
`finish_interrupted` has moved complete checkpoints out of it."""

_WHOLE, _REPLACED = ".whole", ".replaced"  # suffixes: complete but not yet renamed, and replaced by a newer one

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_ROOM_WORDS = (
    "PytorchStreamWriter failed writing",  # torch.save, depending on where in a file it fails
    "iostream error",
    ". unexpected pos ",
    *(f"(os error {number})" for number in _NO_ROOM),  # safetensors
)


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first, after `finish_interrupted`.

    The Trainer writes ``trainer_state.json`` last, so a checkpoint that a stock trainer could not finish has none.
    """
    finish_interrupted(folder)
    found = []
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        if step_of(path) < 0 or not path.is_dir():
            continue
        try:
            json.loads((path / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            logger.warning("%s is not complete (writing it was interrupted); it is not used.", path)
            continue
        found.append(path)
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step in a checkpoint's name; -1 for any other name."""
    number = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", checkpoint.name)
    return -1 if number is None else int(number.group(1))


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the text says where, and how much space was free."""


def room_in(folder: Path) -> str:
    """How much space a run's folder has, and how to free some: a new checkpoint is written before one is deleted."""
    whole = folder.absolute()
    free = shutil.disk_usage(next(path for path in (whole, *whole.parents) if path.exists())).free
    room = f"{free / 2**20:,.1f} MiB were free there"
    checkpoints = complete_checkpoints(folder)
    if not checkpoints:
        return room
    oldest = checkpoints[0]
    size = f"{sum(path.stat().st_size for path in oldest.rglob('*') if path.is_file()) / 2**20:,.1f} MiB"
    if len(checkpoints) == 1:  # without it there would be nothing to resume from
        return f"{room}, beside the only checkpoint, {str(oldest)!r} ({size})"
    return f"{room}; delete an old checkpoint, of which {str(oldest)!r} ({size}) is the oldest"


def out_of_room(error: BaseException) -> bool:
    """Whether an error, of whatever library, says that nothing more could be written."""
    return getattr(error, "errno", None) in _NO_ROOM or any(words in str(error) for words in _NO_ROOM_WORDS)


class WholeCheckpointsMixin(Trainer):
    """Comes before a Trainer: ``checkpoint-N`` gets its name only when every process has written its part.

    So a process that is killed while it saves leaves the earlier checkpoints and no incomplete one. Older checkpoints
    are deleted (`save_total_limit`) only after that. This does not protect against a loss of power, after which a disk
    may not have what was written last.
    """

    _saving = False

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._saving else folder

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._saving:  # an upload reads the folder in the background, so it must have its final name
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
            with _naming_the_place(final, staged.parent):
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
            _date_last(final)
            rotate_checkpoints(
                output_dir=str(run_dir),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
                use_mtime=True,
            )

    def _name_the_best(self, run_dir: Path, staged: Path) -> None:
        """Puts the final name of the best checkpoint into the state; the Trainer has put its staging name there."""
        if self.args.save_strategy == SaveStrategy.NO or not self.state.best_global_step:
            return
        best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        if best.name != staged.name and not best.exists():
            return
        self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))


def put_in_place(staged: Path, final: Path) -> None:
    """Gives a complete checkpoint its final name, and removes the folder that it was written in.

    One process of every machine calls this. If the machines share the folder, the rename succeeds for one of them.
    """
    whole = staged.with_name(staged.name + _WHOLE)
    try:
        staged.rename(whole)
    except FileNotFoundError:
        return
    if final.exists():  # of the same step, from an earlier run
        final.rename(staged.with_name(staged.name + _REPLACED))
    whole.rename(final)
    shutil.rmtree(staged.parent, ignore_errors=True)


def _date_last(checkpoint: Path) -> None:
    """Makes a checkpoint the newest of its folder by its date, by which old ones are deleted.

    Otherwise it would be deleted itself where the others were written by a host, or on a disk, whose clock is ahead.
    """
    others = [path.stat().st_mtime for path in checkpoint.parent.glob(f"{PREFIX_CHECKPOINT_DIR}-*")]
    if checkpoint.stat().st_mtime < max(others):
        date = max(others) + 2.0  # dates within a second of each other are not believed
        os.utime(checkpoint, (date, date))


def finish_interrupted(folder: Path) -> None:
    """Gives complete checkpoints in `folder` their final names if their process was killed before it could.

    Any number of processes may call this at the same time.
    """
    for whole in (folder / STAGING).glob(f"{PREFIX_CHECKPOINT_DIR}-*{_WHOLE}"):
        final = folder / whole.name.removesuffix(_WHOLE)
        if not final.exists():  # otherwise it is the one to be replaced, which is complete too
            with contextlib.suppress(FileNotFoundError):  # another process was first
                whole.rename(final)


@contextlib.contextmanager
def _naming_the_place(final: Path, staging: Path) -> Iterator[None]:
    """Around the writing of a checkpoint: an error names the path and the free space; what was written is removed."""
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
            "removed; the earlier checkpoints are unchanged.",
        ) from error
