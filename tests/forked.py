"""Processes that are forked from one that has imported the libraries, which takes a new one ten seconds of work.

The server is started at the first use in a test process, and lives as long as that. It imports and does nothing else:
no group or accelerator is in use where it forks. Its children share a hash seed and draw from the seed of the test;
tests that start programs as a user does (`accelerate launch`, `python -m liger_trainer`) have one in every process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import torch

from tests.seeding import seed

ROOT = Path(__file__).parents[1]
IMPORTED = [
    "pytest",
    "peft",
    "transformers.models.auto.modeling_auto",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "liger_trainer.recipe.run",
    "liger_trainer.trainers.trainer",
    "liger_trainer.trainers.sft_trainer",
    "liger_trainer.trainers.reference_trainers",
    "liger_trainer.trainers.generation_trainers",
    "tests.speedups",
    "tests.uninitialised",
]
"""What the server imports; a child imports what else it needs."""
LIMIT = 240
"""Seconds after which a process says where it is, and ends."""


@dataclasses.dataclass
class Done:
    """What is left of processes: the names are those of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def forking() -> ForkServerContext:
    """The context whose processes are forked from the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with contextlib.chdir(ROOT):  # the server imports from where it starts, and passes by what it does not find
        forkserver.ensure_running()
    return context


class Running:
    """A process that has been started: `process`, and what it has done when it has ended."""

    def __init__(self, program: tuple[Any, ...]) -> None:
        self._logs = tempfile.TemporaryDirectory()
        self.process = forking().Process(target=_main, args=(program, self._logs.name))
        self.process.start()

    def done(self, timeout: float | None = None) -> Done:
        """Waits for its end; after `timeout` seconds it is killed."""
        self.process.join(timeout)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        with self._logs as logs:
            return Done(self.process.exitcode or 0, _written(logs, "stdout"), _written(logs, "stderr"))


def start(
    work: Callable[..., int | None],
    *arguments: Any,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Running:
    """As `subprocess.Popen`, with `work(*arguments)` for a program, whose exit status is what `work` returns.

    Args:
        work: A function of a module, by whose name the process finds it.
        arguments: Its arguments.
        cwd: The working directory.
        environment: Variables beside those of the server.
    """
    return Running((work, arguments, str(cwd), dict(environment or {}), torch.initial_seed()))


def run(
    work: Callable[..., int | None],
    *arguments: Any,
    cwd: Path = ROOT,
    environment: Mapping[str, str] | None = None,
) -> Done:
    """As `subprocess.run`; the arguments are those of [`start`]."""
    return start(work, *arguments, cwd=cwd, environment=environment).done()


def torchrun(
    work: Callable[..., int | None],
    *arguments: Any,
    processes: int = 2,
    environment: Mapping[str, str] | None = None,
) -> Done:
    """As `torchrun --standalone --nproc_per_node=PROCESSES`, with `work(*arguments)` for a script.

    What the processes wrote is followed by torchrun's own summary of a failure.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    forking()
    with tempfile.TemporaryDirectory() as logs:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=processes, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
            run_id=Path(logs).name, max_restarts=0, monitor_interval=0.1, start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=logs, redirects=Std.ALL),
        )  # fmt: skip
        program = (work, arguments, str(ROOT), dict(environment or {}), torch.initial_seed())
        summary = ""
        # Beside the main thread, in which it would take over the signals of the test process.
        with ThreadPoolExecutor(1) as launcher:
            try:
                launcher.submit(elastic_launch(config, _rank), program).result()
            except ChildFailedError as error:
                summary = str(error)
        return Done(int(bool(summary)), _written(logs, "stdout"), _written(logs, "stderr") + summary)


def _written(logs: str, stream: str) -> str:
    return "".join(path.read_text() for path in sorted(Path(logs).rglob(f"{stream}.log")))


def _rank(program: tuple[Any, ...]) -> None:
    work, arguments, cwd, environment, seed_of_the_test = program
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    gc.freeze()  # the imported libraries, which are no garbage
    os.chdir(cwd)
    torch.set_num_threads(1)
    os.environ.update(environment)
    seed(seed_of_the_test)
    try:
        code = work(*arguments)
    except Exception:
        traceback.print_exc()  # at once: another process may notice, and end this one, before it has ended itself
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.stdout.flush()
        sys.stderr.flush()
    if code:
        sys.exit(code)


def _main(program: tuple[Any, ...], logs: str) -> None:
    for number, stream in enumerate(("stdout", "stderr"), start=1):
        with Path(logs, f"{stream}.log").open("wb") as file:
            os.dup2(file.fileno(), number)
    try:
        _rank(program)
    except Exception:  # which is printed
        sys.exit(1)
