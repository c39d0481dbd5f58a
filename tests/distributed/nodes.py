"""Commands that are run on several nodes, which are this machine several times over."""

from __future__ import annotations

import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
TIMEOUT = 300
Command = tuple[list[str], dict[str, str]]
"""Words, and what they need in the environment."""


def nodes_of(processes: int) -> list[dict[str, str]]:
    """The environment of each node: one for all `processes`, or one a process where they outnumber the GPUs.

    NCCL wants a GPU of its own for every process of a node; processes that call themselves nodes share one, in turns,
    and talk over sockets.
    """
    gpus = torch.cuda.device_count()
    if processes <= gpus:
        return [{}]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    return [
        {"CUDA_VISIBLE_DEVICES": visible[rank % gpus], "NCCL_HOSTID": f"node{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        for rank in range(processes)
    ]


def free_port() -> int:
    """A port for a rendezvous."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_nodes(commands: list[Command], timeout: int = TIMEOUT) -> None:
    """Runs `commands` at once, each on a node of its own.

    Raises:
        AssertionError: with the end of what was printed, where a node failed.
    """

    def run(command: Command) -> str:
        words, environment = command
        done = subprocess.run(
            words, cwd=ROOT, env={**os.environ, **environment}, timeout=timeout, capture_output=True, text=True
        )
        return f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}" if done.returncode else ""

    with ThreadPoolExecutor(len(commands)) as pool:
        failures = [failure for failure in pool.map(run, commands) if failure]
    assert not failures, "\n".join(failures)
