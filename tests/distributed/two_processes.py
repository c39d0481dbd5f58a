"""Runs the cases of a test file on two gloo processes, or more, which are started once for all of them.

A case that fails stops no other. With one that hangs or ends its rank the rest is lost, and the report says where each
rank was.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import os
import queue
import traceback
from collections.abc import Sequence

import torch.distributed as dist
import torch.multiprocessing as mp

from tests.distributed.nodes import free_port
from tests.forked import forking, start
from tests.seeding import seed

WORLD = 2
CASE_TIMEOUT = 60
"""Seconds that a rank waits for another, after which the case has failed."""
SILENCE = 3 * CASE_TIMEOUT
"""Seconds of one case after which a rank says where it is, and ends."""


def _run_cases(module: str, names: Sequence[str], rank: int, world: int, port: int, results: mp.Queue) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # transformers would build its mesh of what is there
    cases = importlib.import_module(module).CASES
    timeout = datetime.timedelta(seconds=CASE_TIMEOUT)
    store = dist.TCPStore("127.0.0.1", port, world, is_master=rank == 0, timeout=2 * timeout)
    for index, name in enumerate(names):
        if not dist.is_initialized():
            group = dist.PrefixStore(f"group {index}", store)
            dist.init_process_group("gloo", store=group, rank=rank, world_size=world, timeout=timeout)
        failure = ""
        faulthandler.dump_traceback_later(SILENCE, exit=True)
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
    results = forking().Queue()
    ranks = [start(_run_cases, module, names, rank, world, port, results) for rank in range(world)]
    found: dict[str, list[str]] = {name: [] for name in names}
    while any(len(each) < world for each in found.values()):
        try:
            name, failure = results.get(timeout=1)
        except queue.Empty:
            if any(each.process.exitcode not in (None, 0) for each in ranks):
                break
            continue
        found[name].append(failure)
    done = [each.done(timeout=10) for each in ranks]
    ends = (f"rank {rank} ended with {each.returncode}: {each.stderr}" for rank, each in enumerate(done))
    lost = "in this case or in an earlier one " + "\n".join(ends)
    return {name: "\n".join(filter(None, [*each, lost * (len(each) < world)])) for name, each in found.items()}
