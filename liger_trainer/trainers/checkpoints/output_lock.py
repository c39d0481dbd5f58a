"""One run at a time writes in an output folder."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

logger = logging.getLogger("liger_trainer")

LOCK = "_lock"
"""The file in ``output_dir`` that a run locks, and removes at its end. Uploads leave names with this start out."""

_owned: dict[Path, int] = {}  # by this process, in the thread of this number: a lock keeps only other processes out


@contextlib.contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Makes `folder` this run's own meanwhile; all processes of the run call this, and its first one locks.

    The system unlocks it when that process ends, however it ends. Where the file system has no locks, that is said, and
    the run goes on without. Inside another `owned` of the same folder it does nothing.

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
    """The locked file (None where there are no locks), and why it could not be locked."""
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
            file.close()  # of a run that has ended just now, and taken the file away
        file.truncate(0)
        since = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"pid {os.getpid()} on {socket.gethostname()}, since {since}\n")
        file.flush()
    except (OSError, ImportError) as error:
        logger.warning("%s cannot be locked (%s): nothing keeps another run from writing there.", folder, error)
        return None, None
    return file, None


def _lock(file: IO[str]) -> bool:
    """Whether no other process had it; an OSError where there are no locks."""
    import fcntl  # not on Windows

    try:
        # It belongs to the process, while a lock by `flock` would outlive it in the workers of its data loader.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
