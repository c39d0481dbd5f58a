"""Results as data: one record per provider and case, and runs with their machine, versions and command."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import importlib.metadata
import json
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from liger_trainer.benchmarks.device import Device
from liger_trainer.benchmarks.registry import BenchmarkError

ACTIVATION_MEMORY = " activation_memory="
"""In the name of a provider of training steps, stands before the bytes that the layers may keep, or ``auto``."""

OPTIM = " optim="
"""In the name of a provider of training steps, stands before its optimizer, if that is not `DEFAULT_OPTIM`."""

DEFAULT_OPTIM = "adamw_torch_fused"

PADDED = "liger_trainer padded"
"""The provider of training steps that neither packs a batch nor computes a prompt once for several completions."""

UNSHARED = "liger_trainer unshared"
"""The provider that packs a batch, with a prompt for each completion."""

FP8_BASE = "liger_trainer fp8 base"
"""The provider whose base of adapters multiplies in fp8."""

PACKED_BASES = ("fp8_blocks", "fp8_rows", "mxfp4", "int4")
"""Published formats in which a base of adapters stays packed."""

FP8_FORMATS = ("fp8_blocks", "fp8_rows")
"""Those of them that `FP8_BASE` multiplies with as they are."""

OPTIMIZER_STEP = "adamw"
"""The operation of the records of `optimizer_step`."""

_PACKAGES = (  # versions that a run records
    *("torch", "triton", "transformers", "accelerate", "trl", "peft", "bitsandbytes", "torchao"),
    *("liger-kernel", "cut-cross-entropy", "quack-kernels", "fla-core", "mamba-ssm", "causal-conv1d"),
)


@dataclasses.dataclass
class Machine:
    """The machine of a run; its rates are measured in that run."""

    device: str
    copy_rate: float = 0.0  # bytes/s of a large copy, read plus write
    matmul_rate: float = 0.0  # FLOP/s of an 8192³ matmul

    @classmethod
    def measure(cls, device: Device, dtype: torch.dtype, rounds: int = 10) -> Machine:
        """Measures this machine now."""
        size, side = (2**30, 8192) if device.module is not None else (2**22, 256)
        source = torch.randn(size, device=device.device).to(dtype)
        target = torch.empty_like(source)
        left, right = (torch.randn(side, side, device=device.device).to(dtype) for _ in range(2))
        copy, matmul = device.median(lambda: target.copy_(source), rounds), device.median(lambda: left @ right, rounds)
        moved = 2 * source.numel() * source.element_size()
        return cls(device.name(), moved / copy * 1e3, 2e3 * side**3 / matmul)

    def __str__(self) -> str:
        return f"{self.device}: copy {self.copy_rate / 1e12:.2f} TB/s, matmul {self.matmul_rate / 1e12:.0f} TFLOP/s"


@dataclasses.dataclass
class Record:
    """One provider's measurement on one case: medians in milliseconds, and the widths of their samples' middle half.

    Attributes:
        forward: The pass that saves for the backward.
        backward: The gradients of every input that requires one.
        peak_gibibytes: Peak memory above the inputs; None if the device does not count it.
        saved_gibibytes: Memory saved for the backward, without the outputs; None if the device does not count it.
        floor: The least time of the two passes on this machine; `forward_floor` and `backward_floor` if known.
        errors: Relative distance of each output and gradient from float64's, by name.
        worse_than_eager: The largest ratio of a gradient's error to that of eager torch.
        failure: Why there is no measurement; empty if there is one.
    """

    operation: str
    model: str
    tokens: int
    variant: str
    shape: str
    dtype: str
    provider: str
    forward: float | None = None
    backward: float | None = None
    both: float | None = None
    forward_spread: float | None = None
    backward_spread: float | None = None
    both_spread: float | None = None
    peak_gibibytes: float | None = None
    saved_gibibytes: float | None = None
    floor: float | None = None
    forward_floor: float | None = None
    backward_floor: float | None = None
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    worse_than_eager: float | None = None
    remark: str = ""
    failure: str = ""

    @property
    def group(self) -> tuple[str, str, int, str]:
        """The case; records with the same one were measured in turns and belong in one table."""
        return self.operation, self.model, self.tokens, self.variant

    @property
    def skipped(self) -> bool:
        """Whether the provider was not tried, for example because it is not installed."""
        return self.failure.startswith("skipped")

    def gradient_error(self) -> float | None:
        """The largest of the gradients' errors."""
        return max((value for name, value in self.errors.items() if name.startswith("d")), default=None)

    def fraction_of_floor(self, mode: str = "both") -> float | None:
        """Floor divided by time; 1 is the best possible."""
        floor = self.floor if mode == "both" else getattr(self, f"{mode}_floor")
        time = getattr(self, mode)
        return None if floor is None or time is None else floor / time


def compare_with_eager(records: list[Record]) -> None:
    """Fills `worse_than_eager` in the records of one case from torch's record."""
    eager = next((record.errors for record in records if record.provider == "torch"), {})
    for record in records:
        ratios = [
            value / eager[name] for name, value in record.errors.items() if name.startswith("d") and eager.get(name)
        ]
        record.worse_than_eager = max(ratios, default=None)


@dataclasses.dataclass
class Work:
    """What is trained, and how; the same for every provider."""

    model: str  # name in `models.MODELS`
    layers: int = 0  # of the model; 0 for all
    trainer: str = "causal_lm"  # with the Trainer, or TRL's "sft", or one of `training.ALIGNMENT`
    batch: int = 4  # sequences in a step on one GPU, or pairs for `training.PAIRS`
    length: int = 4096  # tokens in a sequence, to which `GROUPS` add a prompt of an eighth; with `lengths`, the most
    checkpointing: bool = True  # whether every layer is recomputed in the backward pass
    _: dataclasses.KW_ONLY
    lora: int = 0  # rank of adapters on all linear layers; 0 to train all weights
    gpus: int = 1  # processes, one per GPU
    accelerate_config: str = ""  # file for `accelerate launch`, in a record its name; empty for one process without it
    quantize: str = ""  # "nf4" for a base that bitsandbytes has quantised, doubly, or one of `PACKED_BASES`; else bf16
    documents: int = 0  # tokens of each document packed into the rows; 0 for rows of one document
    padding: float = 0.0  # share of a step's tokens that is padding, on the right, which do not count; 0 for none
    labelled: float = 1.0  # share of each document's tokens, the last ones, that has a label
    dtype: str = "bfloat16"  # of the weights; those in float32 are trained under bf16 autocast
    lengths: str = ""  # "64:1024" draws each completion's tokens, "512" fixes them; empty for `length`
    prompt: int = 0  # tokens before each completion; 0 with `lengths` of whole sequences, and without `lengths`
    group_size: int = 0  # completions of a prompt for `GROUPS` with `lengths`; 0 for a prompt of its own each
    expert_parallel: int = 1  # processes that share a layer's experts, while FSDP2 splits the rest over all
    context_parallel: int = 1  # processes that each have a part of the same sequences


@dataclasses.dataclass
class TrainingRecord(Work):
    """Training steps of one provider on its work."""

    provider: str = ""
    tokens_per_second: float | None = None  # of one GPU in the median step
    mfu: float | None = None  # of the device's published peak, if that is known
    peak_gibibytes: float | None = None  # of the fullest GPU
    losses: list[float] = dataclasses.field(default_factory=list)  # of each warm-up step, and the others' mean
    failure: str = ""  # why there is no result
    weights_gibibytes: float | None = None  # allocated before the first step
    kept_gibibytes: float | None = None  # of activations, in the last step, where `activation_memory` is set
    first_step_seconds: float | None = None  # from before the trainer is built to the end of its first step

    @property
    def group(self) -> tuple:
        """The task; records with the same one can be compared."""
        return (*self.sweep, self.length, self.gpus)

    @property
    def activation_memory(self) -> str:
        """The bytes that the layers may keep, as they were asked for; empty if they were not."""
        return self.provider.partition(ACTIVATION_MEMORY)[2]

    @property
    def sweep(self) -> tuple:
        """The task without the length of a sequence and the number of GPUs."""
        model = (self.model, self.layers, self.trainer, self.batch)
        rows = (self.documents, self.padding, self.labelled, self.lengths, self.prompt, self.group_size)
        split = (self.accelerate_config, self.expert_parallel, self.context_parallel)
        return (*model, self.dtype, *rows, self.checkpointing, self.lora, self.quantize, *split)


@dataclasses.dataclass
class LongestRecord(TrainingRecord):
    """The longest sequence that one provider trains on, to within an eighth; 0 if none did. See `training.search`."""

    too_long: int | None = None  # tokens in the shortest that did not; None if none was found in time
    tries: dict[str, str] = dataclasses.field(default_factory=dict)  # the outcome of each length, in order


@dataclasses.dataclass
class Run:
    """The records of one command."""

    command: str
    machine: Machine
    versions: dict[str, str]
    date: str
    records: list[Record] = dataclasses.field(default_factory=list)
    training: list[TrainingRecord] = dataclasses.field(default_factory=list)
    longest: list[LongestRecord] = dataclasses.field(default_factory=list)

    @classmethod
    def begin(cls, command: str, machine: Machine) -> Run:
        """An empty run on this machine, with the present time."""
        return cls(command, machine, versions(), _now())

    def write(self, folder: Path, name: str = "results") -> list[Path]:
        """Writes `name`.json, with everything, and `name`.csv, with one line per record; returns the files."""
        folder.mkdir(parents=True, exist_ok=True)
        whole, lines = folder / f"{name}.json", folder / f"{name}.csv"
        whole.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
        setting = {"device": self.machine.device, "date": self.date, "command": self.command, **self.versions}
        rows = [*map(_flat, self.records), *map(_flat, self.training), *map(_flat, self.longest)]
        with lines.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in (*rows, setting) for key in row)))
            writer.writeheader()
            writer.writerows(row | setting for row in rows)
        return [whole, lines]

    @classmethod
    def read(cls, file: Path) -> Run:
        """Reads a file that `write` has written.

        Raises:
            BenchmarkError: if it is another kind of file.
        """
        try:
            content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            content["machine"] = Machine(**content["machine"])
            content["records"] = [Record(**record) for record in content["records"]]
            content["training"] = [TrainingRecord(**record) for record in content["training"]]
            content["longest"] = [LongestRecord(**record) for record in content.get("longest", [])]
            return cls(**content)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise BenchmarkError(f"{file} holds no results: {type(error).__name__}: {error}") from None


def _flat(record: Record | TrainingRecord) -> dict[str, Any]:
    """The fields as cells of a table; each error and each loss gets its own cell."""
    values = dataclasses.asdict(record)
    values.pop("tries", None)  # only in the JSON file
    errors, losses = values.pop("errors", {}), values.pop("losses", [])
    return (
        values
        | {f"error of {key}": value for key, value in errors.items()}
        | {f"loss of step {step}": value for step, value in enumerate(losses, 1)}
    )


def versions() -> dict[str, str]:
    """Installed versions of Python, this package and every compared library."""
    from liger_trainer._version import __version__

    found = {"python": platform.python_version(), "liger-trainer": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"torch": torch.__version__}


def setting(module: str, device: torch.device, argv: Sequence[str] | None) -> dict[str, str]:
    """What a file says of all its numbers: the device, the date, the command and the versions.

    Args:
        module: The command's, in `liger_trainer.benchmarks`.
        device: On which it runs.
        argv: Arguments of the command; None for those of this process.
    """
    return {
        "device": Device(device).name(),
        "date": _now(),
        "command": command_line(module, argv),
        **versions(),
    }


def command_line(module: str, argv: Sequence[str] | None) -> str:
    """How a command of `liger_trainer.benchmarks` was called, with these arguments or those of this process."""
    return shlex.join(["python", "-m", f"liger_trainer.benchmarks.{module}", *(sys.argv[1:] if argv is None else argv)])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


_SHOWN_PACKAGES = (  # versions shown below a table
    *("torch", "triton", "transformers", "trl", "bitsandbytes"),
    *("liger-kernel", "unsloth", "quack-kernels", "cut-cross-entropy", "fla-core", "mamba-ssm", "causal-conv1d"),
)
_Grouped = TypeVar("_Grouped")


def grouped(records: Iterable[_Grouped], key: Callable[[_Grouped], Any]) -> dict[Any, list[_Grouped]]:
    """The records with each value of `key`, in the order in which they come."""
    groups: defaultdict[Any, list[_Grouped]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return dict(groups)


class Results:
    """The newest records of every case and task of one machine, by their groups."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = sorted(runs, key=lambda run: run.date)
        self.cases: dict[tuple, list[Record]] = {}
        self.tasks: dict[tuple, list[TrainingRecord]] = {}
        self._run_of: dict[tuple, Run] = {}
        for run in self.runs:
            cases = grouped(run.records, lambda record: record.group)
            tasks = grouped(run.training, lambda record: record.group)
            self.cases |= cases
            self.tasks |= tasks
            self._run_of |= dict.fromkeys([*cases, *tasks], run)

    @classmethod
    def read(cls, folder: Path) -> Results:
        """The results in every JSON file of a folder."""
        return cls(Run.read(file) for file in sorted(folder.glob("*.json")))

    def version(self, package: str) -> str:
        """A space and the newest run's version of a package; empty if no run has one."""
        found = [run.versions[package] for run in self.runs if package in run.versions]
        return f" {found[-1]}" if found else ""

    def source(self, groups: Iterable[tuple]) -> str:
        """Machine, versions and commands that the records of these groups come from, folded."""
        runs = list({id(run): run for run in (self._run_of[group] for group in groups)}.values())
        lines = []
        for run in runs:
            known = ", ".join(f"{name} {run.versions[name]}" for name in _SHOWN_PACKAGES if name in run.versions)
            lines.append(f"{run.machine.device}, {known}: `{run.command}`")
        folded = "<details markdown><summary>Commands and versions</summary>"
        return f"{folded}\n\n<sub>{'<br>'.join(lines)}</sub>\n\n</details>"
