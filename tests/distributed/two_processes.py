"""Runs the cases of a test file on two gloo processes, or more, which are started once for all of them.

A case that fails or hangs stops no other.
"""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import queue
import time
import traceback
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.nodes import free_port
from tests.forked import forking
from tests.seeding import seed

WORLD = 2
CASE_TIMEOUT = 60
"""Seconds that a rank waits for another, after which the case has failed."""
SILENCE = 3 * CASE_TIMEOUT
"""Seconds without a result after which the processes are given up."""


def _run_cases(module: str, names: Sequence[str], rank: int, world: int, port: int, results: mp.Queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would build its mesh of what is there
    torch.set_num_threads(1)
    gc.freeze()
    cases = importlib.import_module(module).CASES
    timeout = datetime.timedelta(seconds=CASE_TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=2 * timeout)
    for index, name in enumerate(names):
        if not dist.is_initialized():
            group = dist.PrefixStore(f"group {index}", store)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=timeout)
        failure = ""
        seed(module, name)
        try:
            cases[name](rank)
        except Exception:
            failure = f"rank {rank}:\n{traceback.format_exc()}"
        results.put((name, failure))
        store.set(f"{index} {rank}", failure)
        # A failed rank may have left a collective of the group open: the next case gets a new one.
        if any(store.get(f"{index} {each}") for each in range(world)):
            dist.destroy_process_group()
    store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(world)])  # the store lives in rank 0


def outcomes_of(module: str, names: Sequence[str], world: int = WORLD) -> dict[str, str]:
    """Runs the cases `names` on every rank: an empty string where all ranks passed, else why not.

    Args:
        module: The full name of a module with `CASES`, which maps names to functions of the rank.
        names: The cases to run.
        world: How many ranks.
    """
    port = free_port()
    context = forking()
    results = context.Queue()
    arguments = [(module, names, rank, world, port, results) for rank in range(world)]
    workers = [context.Process(target=_run_cases, args=each) for each in arguments]
    for process in workers:
        process.start()
    found: dict[str, list[str]] = {name: [] for name in names}
    last_news = time.monotonic()
    while any(len(each) < world for each in found.values()):
        try:
            name, failure = results.get(timeout=1)
        except queue.Empty:
            died = any(process.exitcode not in (None, 0) for process in workers)
            if died or time.monotonic() - last_news > SILENCE:
                break
            continue
        last_news = time.monotonic()
        found[name].append(failure)
    for process in workers:
        process.join(timeout=10)
        if process.is_alive():
            process.terminate()
    missing = "a rank hung or died in this case or in an earlier one"
    return {name: "\n".join(filter(None, each)) if len(each) == world else missing for name, each in found.items()}
