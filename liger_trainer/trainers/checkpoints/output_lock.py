"""A lock that lets one run at a time write in an output folder."""

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
