"""What `bench training` and `bench longest` train, and the processes that train it, one provider at a time.

Every attempt at the longest sequence runs in a new process, so that one that runs out of memory cannot affect the next.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from liger_trainer.benchmarks.records import LongestRecord, TrainingRecord, Work
from liger_trainer.recipe.schema import TRAINERS

OUT_OF_MEMORY = "out of memory"
_POLL_SECONDS = 0.1
_END_SECONDS = 60.0  # torchrun gives its processes 30
PAIRS = tuple(name for name, kind in TRAINERS.items() if kind.pairs)
"""Trainers whose batch is of pairs: twice as many sequences."""
GROUPS = tuple(name for name, kind in TRAINERS.items() if kind.generates)
"""Trainers on several completions of a prompt, which has no part in `Task.length`."""
ALIGNMENT = (*PAIRS, "kto", *GROUPS)
WHOLE_ROWS = ("kto", "reward")
"""Trainers for which `Task.lengths` without `Task.prompt` are those of whole sequences."""
GROUP_SIZE = 8
"""Completions of a prompt, unless told otherwise."""
_PROMPT_FRACTION = 8  # a prompt is one eighth as long as its sequence,
_SHORT_PROMPT = 4  # or has at most this many tokens where `Task.lengths` are those of whole sequences


@dataclasses.dataclass
class Task(Work):
    """The work, and how it is measured."""

    steps: int = 6
    device: str = ""  # where to train; empty for the accelerator
    warmup: int = 2  # steps at the start that are not timed

    @property
    def batches(self) -> int:
        """How many batches a step has: one for each GPU, or for each group of GPUs that share sequences."""
        return self.gpus // self.context_parallel

    @property
    def samples(self) -> int:
        """Sequences or pairs of all steps and GPUs."""
        return self.batch * self.steps * self.batches

    def to_json(self) -> str:
        """The task as JSON, for the process that trains it."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def step_tokens(self) -> list[float]:
        """Tokens of each step on one GPU: prompts too, and both sequences of a pair.

        Padding counts only where `lengths` makes it: TRL pads each batch to its longest sequence, and a provider that
        does without does the same work. On several GPUs it is their mean.
        """
        if self.trainer not in ALIGNMENT:
            return [sum(self.row_tokens) / self.context_parallel] * self.steps
        padded = [len(batch) * (self.prompt_tokens + max(batch)) for batch in self.completion_tokens]
        starts = range(0, len(padded), self.batches)
        return [sum(padded[start : start + self.batches]) / self.gpus for start in starts]

    @property
    def prompt_tokens(self) -> int:
        """Tokens before each completion."""
        if not self.lengths:
            return self.length // _PROMPT_FRACTION
        return self.prompt or min(_SHORT_PROMPT, parse_lengths(self.lengths)[0] - 1)

    @property
    def completion_tokens(self) -> list[list[int]]:
        """Tokens of each completion, by batches: all those of the first step come first.

        With `lengths` they are drawn uniformly, the same for every provider. A pair's two are neighbours.
        """
        low, high = parse_lengths(self.lengths) if self.lengths else (self.length, self.length)
        of_prompt = 0 if self.prompt or self.trainer in GROUPS else self.prompt_tokens
        draw = random.Random(0)
        rows = self.batch * (2 if self.trainer in PAIRS else 1)
        return [[draw.randint(low, high) - of_prompt for _ in range(rows)] for _ in range(self.steps * self.batches)]

    @property
    def row_tokens(self) -> list[int]:
        """Tokens of each row of a step that are not padding: the last row has none, the others are ever longer.

        Each row is at least two tokens long if ``batch * length * (1 - padding) >= length + 2 * (batch - 1)``.
        """
        others = self.batch - 1
        if not self.padding or not others:
            return [self.length] * self.batch
        total = round(self.batch * self.length * (1 - self.padding)) - self.length
        mean = total / others
        spread = min(mean - 2, self.length - mean) / 2  # of the shortest and the longest around their mean
        places = [2 * place / (others - 1) - 1 if others > 1 else 0.0 for place in range(others)]
        ends = [round(end) for end in itertools.accumulate((mean + spread * place for place in places), initial=0.0)]
        return [after - before for before, after in itertools.pairwise(ends)] + [self.length]


def parse_lengths(text: str) -> tuple[int, int]:
    """The least and the most tokens of "64:1024", or of "512"."""
    low, _, high = text.partition(":")
    return int(low), int(high or low)


class ProcessError(Exception):
    """There is no result; the message says why."""


class TrainingProcess:
    """Trains one provider on each length in turn, in one process or in one process per GPU.

    A context manager; it ends the processes.

    Args:
        task: The work; its own length is ignored.
        lengths: Tokens in a sequence, in turn.
        provider: Name of the provider.
        provider_file: A Python file that registers more providers.
    """

    def __init__(self, task: Task, lengths: list[int], provider: str, provider_file: Path | None = None) -> None:
        self.arguments = [task.to_json(), json.dumps(lengths), provider]
        self.files = [] if provider_file is None else [str(provider_file)]
        self.task = task

    def __enter__(self) -> TrainingProcess:
        self.folder = tempfile.TemporaryDirectory()
        results, self.errors = (Path(self.folder.name) / name for name in ("results.jsonl", "errors.txt"))
        results.touch()
        self.results = results.open(encoding="utf-8")
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [*launch_command(self.task), *self.arguments, str(results), *self.files],
                env=_environment(self.task),
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        return self

    def result(self, seconds: float) -> dict[str, Any]:
        """The measurement on the next length.

        Args:
            seconds: Time limit.

        Raises:
            ProcessError: if it failed or took longer.
        """
        deadline = time.monotonic() + seconds
        line = ""
        while not line.endswith("\n"):
            ended = self.process.poll() is not None  # checked first: a last result may be written in between
            line += self.results.readline()
            if line.endswith("\n"):
                break
            if ended:
                errors = self.errors.read_text(encoding="utf-8", errors="replace")
                raise ProcessError(reason(errors, self.process.returncode))
            if time.monotonic() > deadline:
                raise ProcessError(f"no result in {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)
        return json.loads(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The launcher forwards the signal; its processes are in other sessions and would survive it if it were killed.
        self.process.terminate()
        try:
            self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.results.close()
        self.folder.cleanup()


def launch_command(task: Task) -> list[str]:
    """The command that runs `training_step`: through `accelerate launch` if the task has a configuration."""
    step = ["-m", "liger_trainer.benchmarks.training_step"]
    if not task.accelerate_config:
        return [sys.executable, *step]
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", task.accelerate_config]
    launcher += ["--num_processes", str(task.gpus), "--main_process_port", "0"]
    launcher += ["--mixed_precision", "no"]  # which the training arguments set, for each provider
    # Every process makes the same random weights on its own device; there is nothing to send from the first one.
    return [*launcher, "--fsdp_cpu_ram_efficient_loading", "false", "--fsdp_sync_module_states", "false", *step]


def _environment(task: Task) -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if not task.accelerate_config and ":" not in task.device:  # with several visible GPUs, it would run nn.DataParallel
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return environment


def reason(errors: str, code: int) -> str:
    """Why a process ended, in one line, from its stderr and its exit code."""
    lines = [line for line in errors.splitlines() if line.strip()]
    # The second is from pinned memory, the third from NCCL.
    if any(sign in errors for sign in ("OutOfMemoryError", "CUDA error: out of memory", "'out of memory'")):
        return OUT_OF_MEMORY
    # A traceback ends with the error; its message may go on for lines. torchrun's own comes last and says nothing.
    starts = [line for line in lines if line[:1].isalpha() and "Error" in line.split(":")[0]]
    starts = [line for line in starts if not line.startswith("torch.distributed.elastic.")]
    return starts[-1] if starts else lines[-1] if lines else f"exit code {code}"


def run_lengths(
    task: Task, lengths: list[int], provider: str, provider_file: Path | None = None, seconds: float = 600.0
) -> Iterator[TrainingRecord]:
    """Measures one provider on each length in turn, in the same processes; yields each record when it is complete.

    The first failure is the last record: a longer sequence would fail too.

    Args:
        task: The work; its own length is ignored.
        lengths: Tokens in a sequence, in ascending order.
        provider: Name of the provider.
        provider_file: A Python file that registers more providers.
        seconds: Time limit of a length; that of the first includes starting the processes.
    """
    with TrainingProcess(task, lengths, provider, provider_file) as process:
        for length in lengths:
            record = TrainingRecord(**_work(dataclasses.replace(task, length=length)), provider=provider)
            try:
                yield dataclasses.replace(record, **process.result(seconds))
            except ProcessError as error:
                record.failure = str(error)
                yield record
                return


def run_provider(
    task: Task, provider: str, provider_file: Path | None = None, seconds: float = 600.0
) -> TrainingRecord:
    """[`run_lengths`] on the task's own length."""
    (record,) = run_lengths(task, [task.length], provider, provider_file, seconds)
    return record


def _work(task: Task) -> dict[str, Any]:
    work = {field.name: getattr(task, field.name) for field in dataclasses.fields(Work)}
    return work | {"accelerate_config": Path(task.accelerate_config).stem}


def search(trains: Callable[[int], bool], start: int) -> None:
    """Searches for the longest length for which `trains` is true, to within an eighth.

    From `start`, lengths are doubled or halved until one trains and twice that does not; bisection follows.

    Args:
        trains: Tries a length. An exception ends the search.
        start: The first length, in tokens.
    """
    good, bad = start, start
    if trains(start):
        while trains(bad := 2 * good):
            good = bad
    else:
        while (good := bad // 2) and not trains(good):
            bad = good
    while bad - good > max(good // 8, 1):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if trains(middle) else (good, middle)


class OutOfTime(Exception):
    """Ends the search; results so far are kept."""


def find_longest(
    task: Task,
    provider: str,
    provider_file: Path | None = None,
    seconds: float = 540.0,
    tell: Callable[[str], None] = print,
) -> LongestRecord:
    """Searches for one provider.

    Args:
        task: The work; its length is tried first.
        provider: Name of the provider.
        provider_file: A Python file that registers more providers.
        seconds: Time limit of all attempts together; the attempt that reaches it is ended and not counted.
        tell: Called with the outcome of every attempt.
    """
    record = LongestRecord(**_work(dataclasses.replace(task, length=0)), provider=provider)
    deadline = time.monotonic() + seconds

    def trains(length: int) -> bool:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
        begun = time.monotonic()
        found = run_provider(dataclasses.replace(task, length=length), provider, provider_file, left)
        record.tries[str(length)] = outcome = _outcome(found)
        tell(f"{provider}: {length} tokens, {outcome} ({time.monotonic() - begun:.0f} s)")
        if not found.failure:
            record.length = length
            record.tokens_per_second, record.peak_gibibytes = found.tokens_per_second, found.peak_gibibytes
        elif found.failure == OUT_OF_MEMORY:
            record.too_long = length
        else:  # this does not show what would fit
            raise OutOfTime
        return not found.failure

    try:
        search(trains, task.length)
    except OutOfTime:
        tell(f"{provider}: ended early")
    return record


def _outcome(found: TrainingRecord) -> str:
    memory = "" if found.peak_gibibytes is None else f", {found.peak_gibibytes:.1f} GiB"
    return found.failure or f"trains, {found.tokens_per_second:,.0f} tokens/s{memory}"
