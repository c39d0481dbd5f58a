"""What several tests share is made by one process of pytest-xdist, which may give a file's tests to all of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def shared_folder(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A folder that all test processes of a run share, for one of them at a time; empty for the first.

    Args:
        factory: `tmp_path_factory` of the process.
        name: The folder's, another for each use.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield factory.mktemp(name)
        return
    folder = factory.getbasetemp().parent / name  # above the folders of the processes
    folder.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
