"""What a process of several does with an error: the one that has it is heard, and nobody waits for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence

LAUNCHER_SECONDS = 5.0
"""What a launcher gets to end a process whose peer has died; torchrun looks ten times a second."""


def recorded(run: Callable[[str, Sequence[str]], int]) -> Callable[[str, Sequence[str]], int | None]:
    """`run`, whose errors reach the launcher's summary: the traceback of the rank that failed first, and no other.

    A rank that dies breaks the collectives of all others, within microseconds. Their errors are no cause, and they wait
    here to be ended by the launcher, which takes the earliest error it finds for the root of all.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    def patient(name: str, arguments: Sequence[str]) -> int:
        try:
            return run(name, arguments)
        except Exception as error:
            if lost_a_peer(error):
                time.sleep(LAUNCHER_SECONDS)
            raise

    return record(patient)


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed, as one does whose peer has died: NCCL has a class for it, gloo only its path."""
    import torch

    if not torch.distributed.is_available():
        return False
    return isinstance(error, torch.distributed.DistError) or "gloo/transport/" in str(error)


def rank() -> int:
    """Of this process, as its launcher says it."""
    return int(os.environ.get("RANK", "0"))


def leave_process_group() -> None:
    """Leaves the process group, where there is one. All processes do: leaving may wait for the others."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
