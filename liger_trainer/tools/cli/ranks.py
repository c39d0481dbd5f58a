"""Errors in one of several processes: the rank that failed first reports it, and no rank waits for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

LAUNCHER_SECONDS = 5.0
"""Time for a launcher to end a process whose peer has died; torchrun looks ten times a second."""


def recorded(run: Callable[[str, Sequence[str]], int]) -> Callable[[str, Sequence[str]], int | None]:
    """Wraps `run` so that the launcher's summary shows the traceback of the rank that failed first, and no other.

    When a rank dies, the collectives of all others fail within microseconds. The launcher takes the earliest error that
    it finds for the root cause, so the other ranks wait here until it ends them.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    def wait_before_reporting_a_lost_peer(name: str, arguments: Sequence[str]) -> int:
        try:
            return run(name, arguments)
        except Exception as error:
            if lost_a_peer(error):
                time.sleep(LAUNCHER_SECONDS)
            raise

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


def leave_process_group() -> None:
    """Leaves the process group, if there is one. Every process must call this: leaving may wait for the others."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
