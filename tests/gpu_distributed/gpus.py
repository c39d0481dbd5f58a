"""Runs `work` of a test module on GPUs, one process each, or in turns where processes outnumber them."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.nodes import free_port, nodes_of, run_nodes

needs_gpu = pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")


def results_of(module: str, folder: Path, processes: int = 2, **environment: str) -> list[dict[str, Any]]:
    """What `work(folder)` of `module` wrote on each rank with [`write_results`]."""
    nodes = nodes_of(processes)
    command = [sys.executable, "-m", "torch.distributed.run", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    command += [f"--nnodes={len(nodes)}", f"--nproc_per_node={processes // len(nodes)}"]
    run_nodes(
        [
            ([*command, f"--node_rank={rank}", "-m", module, str(folder)], environment | node)
            for rank, node in enumerate(nodes)
        ]
    )
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def join_group() -> int:
    """Joins the group of all ranks, in full fp32; returns this one's."""
    gpu = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(gpu)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=torch.device("cuda", gpu))
    return dist.get_rank()


def failures_in(checks: Mapping[str, Callable[[int], object]], rank: int) -> dict[str, Any]:
    """Runs `checks` on all ranks, one after another: how each failed here, empty where it did not."""
    found = {}
    for name, check in checks.items():
        try:
            check(rank)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        dist.barrier()
    return found


def write_results(folder: str, results: dict[str, Any]) -> None:
    """Leaves `results` of this rank for [`results_of`]."""
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
