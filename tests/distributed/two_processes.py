"""Runs the cases of a test file on two processes, or more, which are started once for all of them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.nodes import free_port
from tests.forked import forking

WORLD = 2


def run_cases(cases: Mapping[str, Callable[[int], object]], rank: int, failures: mp.Queue) -> None:
    """Runs every case in a process that has joined its group, and reports what fails."""
    for name, case in cases.items():
        try:
            case(rank)
        except Exception:
            failures.put((name, f"rank {rank}:\n{traceback.format_exc()}"))
        # A failed rank may have left a collective open: the next case must not meet it.
        dist.barrier()
    failures.put(None)


def set_up_process(rank: int, port: int, world: int = WORLD) -> None:
    """What a process needs before it joins the group."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.set_num_threads(1)


def run_gloo_cases(
    cases: Mapping[str, Callable[[int], object]], rank: int, port: int, failures: mp.Queue, world: int = WORLD
) -> None:
    """`run_cases` of a gloo process."""
    set_up_process(rank, port, world)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    run_cases(cases, rank, failures)
    dist.destroy_process_group()


def failures_of(worker: Callable[[int, int, mp.Queue], None], timeout: int = 120, world: int = WORLD) -> dict[str, str]:
    """Starts `worker(rank, port, failures)` on every rank; returns the failures by case.

    Args:
        worker: A function of a test file, as the processes import it by name.
        timeout: Seconds without news after which the run is given up.
        world: How many ranks.
    """
    port = free_port()
    context = forking()
    queue = context.Queue()
    workers = [context.Process(target=worker, args=(rank, port, queue)) for rank in range(world)]
    for process in workers:
        process.start()
    found: dict[str, str] = {}
    done = 0
    try:
        while done < world:
            item = queue.get(timeout=timeout)
            if item is None:
                done += 1
            else:
                found.setdefault(*item)
    finally:
        for process in workers:
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
    return found
