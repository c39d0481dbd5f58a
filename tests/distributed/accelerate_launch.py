"""Runs a worker under `accelerate launch` with a file of `configs/accelerate`, and reads what it found."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.commands import launch as accelerate_launch

from tests import forked
from tests.distributed.accelerate_cases import VOCAB, WRAPPINGS, Wrapping
from tests.distributed.matrix_models import build_model
from tests.distributed.nodes import ROOT, free_port, nodes_of, run_nodes
from tests.trainers.tiny import tokenizer

Outcome = tuple[dict[str, Any], dict[str, torch.Tensor]]


def gpu_count() -> int:
    """The number of accelerators."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def on_gpus() -> bool:
    """Whether processes run on accelerators, several on one where these are few; otherwise on the CPU, with gloo."""
    return gpu_count() >= 1


def launch(wrapping: str, worker: str, *arguments: str, processes: int | None = None) -> None:
    """Runs `tests.distributed.WORKER ARGUMENTS`: on accelerators in new processes, else in forked ones.

    Args:
        wrapping: A name of `WRAPPINGS`.
        worker: A module beside this one.
        arguments: For the module.
        processes: Another number of them.

    Raises:
        AssertionError: with the end of what was printed, where a process died.
    """
    how = WRAPPINGS[wrapping]
    processes = processes or how.processes
    flags = ["--config_file", f"configs/accelerate/{how.config}.yaml", *how.flags, "--mixed_precision", "no"]
    run = _run_on_accelerators if on_gpus() else _run_forked
    run(how, processes, flags, worker, arguments)


def _run_on_accelerators(
    how: Wrapping, processes: int, flags: list[str], worker: str, arguments: tuple[str, ...]
) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    if processes == 1:  # the Trainer would put a model on every GPU it sees
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    nodes = nodes_of(processes)
    if how.config.startswith("zero") and len(nodes) > 1:
        command += ["--deepspeed_multinode_launcher", "standard"]  # the default one goes to other machines
    command += ["--num_processes", str(processes), "--num_machines", str(len(nodes)), "--machine_rank"]
    rendezvous = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(free_port())]
    worker_of = ["-m", f"tests.distributed.{worker}", *arguments]
    run_nodes([([*command, str(rank), *rendezvous, *worker_of], environment | node) for rank, node in enumerate(nodes)])


def _run_forked(how: Wrapping, processes: int, flags: list[str], worker: str, arguments: tuple[str, ...]) -> None:
    if how.config == "fsdp1":  # where parameters start out empty, on an accelerator
        flags += ["--fsdp_cpu_ram_efficient_loading", "false", "--fsdp_sync_module_states", "false"]
    flags += ["--num_processes", str(processes), "--main_process_port", str(free_port()), "worker.py"]
    done = as_launched(flags, _work, worker, arguments, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, f"{how}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"


_launching = threading.Lock()


def as_launched(
    flags: list[str], work: Callable[..., int | None], *arguments: Any, environment: dict[str, str] | None = None
) -> forked.Done:
    """Runs `work(*arguments)` in forked processes: as many, and in the environment, as `accelerate launch FLAGS` would.

    `tests/tools/cli/test_launch.py` and `tests/tools/cli/test_faults.py` run the command itself.
    """
    start, variables = _launched(flags)
    return start(work, *arguments, environment={**variables, "DS_ACCELERATOR": "cpu", **(environment or {})})


def environment_of(flags: list[str]) -> dict[str, str]:
    """What `accelerate launch FLAGS` puts into the environment of its processes, but for what differs between them."""
    return _launched(flags)[1]


def _launched(flags: list[str]) -> tuple[Callable[..., forked.Done], dict[str, str]]:
    """How `accelerate launch FLAGS` would start its processes, and what it puts into their environment."""
    found: list[tuple[Callable[..., forked.Done], dict[str, str]]] = []

    def popen(command: list[str], env: dict[str, str]) -> mock.Mock:
        found.append((forked.run, env))
        return mock.Mock(returncode=0)

    def torchrun(arguments: argparse.Namespace) -> None:
        count = int(arguments.nproc_per_node)
        found.append((functools.partial(forked.torchrun, processes=count), dict(os.environ)))

    parser = accelerate_launch.launch_command_parser()
    with (
        _launching,  # the environment is changed meanwhile
        mock.patch.object(accelerate_launch.subprocess, "Popen", popen),
        mock.patch("torch.distributed.run.run", torchrun),
    ):
        before = dict(os.environ)
        accelerate_launch.launch_command(parser.parse_args(flags))
    ((start, environment),) = found
    return start, {name: value for name, value in environment.items() if before.get(name) != value}


def _work(worker: str, arguments: tuple[str, ...]) -> None:
    importlib.import_module(f"tests.distributed.{worker}").main(*arguments)


class Launches:
    """Launches that are made once each, below `folder`, which gets the models that trainers load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[tuple[str, int | None], str] = {}
        for name in ("full", "tied head"):
            build_model(name, vocab_size=VOCAB).save_pretrained(folder / "models" / name)
            tokenizer().save_pretrained(folder / "models" / name)

    def once(self, wrapping: str, worker: str, *arguments: str, processes: int | None = None) -> Path:
        """The folder in which `worker` ran with `arguments`; how a process died without a word is printed every time.

        The worker ends at each case that fails, and is launched again for what is not in the folder.
        """
        folder, key = self.folder / wrapping, (wrapping, processes)
        folder.mkdir(exist_ok=True)
        while key not in self._made:
            before = len(list(folder.glob("*.json")))
            try:
                launch(wrapping, worker, str(folder), *arguments, processes=processes)
                self._made[key] = ""
            except (AssertionError, subprocess.TimeoutExpired) as error:
                if isinstance(error, subprocess.TimeoutExpired) or len(list(folder.glob("*.json"))) == before:
                    self._made[key] = f"{key}: {error}"
        print(self._made[key][-6000:])
        return folder


def together(launches: list[Callable[[], object]]) -> None:
    """Makes `launches`, several at a time: starting processes, of which few run at once, is most of their time."""
    with ThreadPoolExecutor(None if on_gpus() else 2) as pool:
        for running in [pool.submit(each) for each in launches]:
            running.result()


def outcome(path: Path) -> Outcome:
    """What a worker wrote to `path`.

    Raises:
        AssertionError: where a process failed in this case, or in one before.
    """
    assert Path(f"{path}.json").exists(), f"{path.name} did not run"
    found = json.loads(Path(f"{path}.json").read_text())
    assert "failure" not in found, found["failure"]
    return found, torch.load(f"{path}.pt")


def relative(value: torch.Tensor, wanted: torch.Tensor, start: torch.Tensor | None = None) -> float:
    """How far `value` is from `wanted`, over the size of `wanted`, or of its way from `start`."""
    size = (wanted if start is None else wanted - start).norm().item()
    return (value - wanted).norm().item() / max(size, 1e-30)
