"""Runs the cells of the matrix on two processes that are started once; a cell that fails or hangs stops no other."""

from __future__ import annotations

import datetime
import queue
import socket
import time
import traceback

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.matrix import CELLS, run_cell
from tests.distributed.two_processes import WORLD, set_up_process
from tests.forked import forking

CELL_TIMEOUT = 30
"""Seconds that a rank waits for the other, after which the cell has failed."""
SILENCE = 3 * CELL_TIMEOUT
"""Seconds without a result after which the processes are given up."""

Outcomes = dict[str, str]


def _run_cells(names: list[str], rank: int, port: int, results: mp.Queue) -> None:
    set_up_process(rank, port)
    timeout = datetime.timedelta(seconds=CELL_TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0, timeout=2 * timeout)
    for index, name in enumerate(names):
        if not dist.is_initialized():
            group = dist.PrefixStore(f"group {index}", store)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=WORLD, timeout=timeout)
        failure = ""
        try:
            run_cell(CELLS[name], rank)
        except Exception:
            failure = f"rank {rank}:\n{traceback.format_exc()}"
        results.put((name, failure))
        store.set(f"{index} {rank}", failure)
        # Past the group, in which a failed rank may have left a collective open: the next cell gets a new one.
        if any(store.get(f"{index} {each}") for each in range(WORLD)):
            dist.destroy_process_group()
    store.set(f"done {rank}", "")
    store.wait([f"done {each}" for each in range(WORLD)])  # the store lives in rank 0


def outcomes_of(names: list[str]) -> Outcomes:
    """What became of the cells `names`: an empty string where both ranks passed, else why not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = forking()
    results = context.Queue()
    workers = [context.Process(target=_run_cells, args=(names, rank, port, results)) for rank in range(WORLD)]
    for process in workers:
        process.start()
    found: dict[str, list[str]] = {name: [] for name in names}
    last_news = time.monotonic()
    while any(len(each) < WORLD for each in found.values()):
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
    missing = "a rank hung or died in this cell or in an earlier one"
    return {name: "\n".join(filter(None, each)) if len(each) == WORLD else missing for name, each in found.items()}
