"""``liger-trainer bench``: operations side by side with their peers, training steps, and the longest sequence."""

from __future__ import annotations

import argparse
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING

from liger_trainer.cli.parser import complain, positive

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from liger_trainer.benchmarks.device import Device

_ROUNDS, _QUICK_ROUNDS = 12, 5
_SECONDS, _QUICK_SECONDS = 60.0, 15.0
_QUICK_TOTAL_SECONDS = 420.0
_CPU_TOKENS = 128


def add_parser(commands: argparse._SubParsersAction) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="time, memory and gradient error of every operation, beside other libraries",
        description="Measures operations with every provider that is installed, in turns: time of forward and "
        "backward, peak memory, gradient error against float64, and the share of what the machine could do. "
        "Without OPS, lists what can be measured. `training` measures Trainer steps, each provider in processes of its "
        "own, one a GPU; `longest` "
        "looks for the longest sequence that each provider trains on, one process a try.",
    )
    parser.add_argument("operations", nargs="*", metavar="OPS", help="operations, `all`, `training` or `longest`")
    parser.add_argument("--model", type=_names, metavar="NAME[,...]", help="whose shapes; default: llama3-8b")
    parser.add_argument("--tokens", type=_counts, metavar="N[,...]", help="token counts; default: each operation's own")
    parser.add_argument("--providers", type=_names, metavar="NAME[,...]", help="libraries to compare; default: all")
    parser.add_argument(
        "--provider_file", type=Path, metavar="FILE", help="Python file with `@provider` functions of your own"
    )
    parser.add_argument(
        "--mode",
        choices=["forward", "backward", "both"],
        default="both",
        help="the time that percentages and plots are of; all three are always measured",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write results.json, results.csv and plots here")
    parser.add_argument("--quick", action="store_true", help="fewer samples, 15 seconds an operation, 7 minutes in all")
    parser.add_argument("--rounds", type=positive, metavar="N", help="samples of each provider; default: 12")
    parser.add_argument("--seconds", type=positive, metavar="S", help="time box of an operation; default: 60")
    parser.add_argument("--no_accuracy", action="store_true", help="leave the comparison with float64 out")
    parser.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    training = parser.add_argument_group("training", "only for `bench training` and `bench longest`")
    training.add_argument(
        "--trainer", choices=["causal_lm", "sft", "dpo", "grpo"], help="the Trainer, or TRL's; default: causal_lm, dpo"
    )
    training.add_argument(
        "--batch", type=positive, metavar="N", help="sequences or pairs of a step on one GPU; default: 4, 1"
    )
    training.add_argument(
        "--length", type=_counts, metavar="N[,...]", help="their tokens, in turn or at first; default: 4096, 16384"
    )
    training.add_argument("--steps", type=positive, metavar="N", help="steps of a length; default: 6, 2")
    training.add_argument(
        "--warmup", type=int, choices=range(100), default=2, metavar="N", help="of these, not timed; default: 2"
    )
    training.add_argument(
        "--gpus", type=_counts, metavar="N[,...]", help="numbers of GPUs, in turn; default: 1; not for `longest`"
    )
    training.add_argument(
        "--accelerate_config",
        metavar="NAME",
        help="ddp, fsdp2, ..., or a file of accelerate; default of several --gpus: fsdp2, or ddp on CPUs",
    )
    training.add_argument("--layers", type=positive, default=0, metavar="N", help="of the model; default: all")
    training.add_argument("--lora", type=positive, default=0, metavar="R", help="rank of adapters; default: none")
    training.add_argument("--quantize", choices=["nf4"], default="", help="base in 4 bits, with --lora; default: bf16")
    training.add_argument("--no_checkpointing", action="store_true", help="keep every activation")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> list[int]:
    return [positive(name) for name in _names(text)]


def bench(arguments: argparse.Namespace, argv: list[str]) -> int:
    """Measures what was asked for; returns the exit code.

    Args:
        arguments: The parsed command line.
        argv: The command line, which is written beside the results.
    """
    from liger_trainer.benchmarks.registry import BenchmarkError

    command = shlex.join(["liger-trainer", *argv])
    try:
        if not arguments.operations:
            return _show_what_there_is(arguments)
        if arguments.operations in (["training"], ["longest"]):
            from liger_trainer.cli.bench_training import train

            return train(arguments, command)
        for name in ("training", "longest"):
            if name in arguments.operations:
                raise BenchmarkError(f"`{name}` is measured by itself; leave the other operations out.")
        return _measure(arguments, command)
    except BenchmarkError as error:
        if arguments.debug:
            raise
        return complain(error)


def _show_what_there_is(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from liger_trainer.benchmarks.models import MODELS
    from liger_trainer.benchmarks.registry import OPERATIONS

    load_providers(arguments)
    table = Table("operation", "what it is", "providers")
    for operation in OPERATIONS.values():
        table.add_row(operation.name, operation.description, ", ".join(operation.providers))
    console = Console()
    console.print(table)
    console.print(f"models: {', '.join(MODELS)}")
    console.print("training: Trainer steps of a whole model, processes of its own for each provider")
    console.print("longest: the longest sequence that each provider trains on, one process a try")
    return 0


def load_providers(arguments: argparse.Namespace) -> None:
    """Registers every operation and provider, those of ``--provider_file`` too."""
    from liger_trainer.benchmarks.registry import load_operations, load_provider_file

    load_operations()
    if arguments.provider_file is not None:
        load_provider_file(arguments.provider_file)


def _measure(arguments: argparse.Namespace, command: str) -> int:
    import torch

    from liger_trainer.benchmarks.device import Device
    from liger_trainer.benchmarks.measure import DeviceLost
    from liger_trainer.benchmarks.models import MODELS
    from liger_trainer.benchmarks.records import Machine, Run
    from liger_trainer.benchmarks.registry import OPERATIONS, closest, family
    from liger_trainer.benchmarks.report import table
    from liger_trainer.benchmarks.suite import Settings, run_operation

    load_providers(arguments)
    names = [closest(name, [*OPERATIONS, "all", "training", "longest"], "operation") for name in arguments.operations]
    operations = [OPERATIONS[name] for name in (OPERATIONS if "all" in names else names)]
    libraries = dict.fromkeys(family(known) for operation in OPERATIONS.values() for known in operation.providers)
    device = Device(find_device(arguments.device))
    settings = Settings(
        models=tuple(MODELS[name] for name in model_names(arguments.model, device)),
        tokens=tuple(arguments.tokens or ([_CPU_TOKENS] if device.module is None else [])),
        providers=tuple(closest(name, libraries, "provider") for name in arguments.providers or []),
        dtype=getattr(torch, arguments.dtype),
        rounds=arguments.rounds or (_QUICK_ROUNDS if arguments.quick else _ROUNDS),
        seconds=arguments.seconds or (_QUICK_SECONDS if arguments.quick else _SECONDS),
        deadline=time.monotonic() + _QUICK_TOTAL_SECONDS if arguments.quick else float("inf"),
        accuracy=not arguments.no_accuracy,
    )
    console = make_console()
    run = Run.begin(command, Machine.measure(device, settings.dtype))
    console.print(str(run.machine), run.versions)
    try:
        for operation in operations:
            for records in run_operation(operation, settings, device, run.machine, console.print):
                run.records += records
                console.print(table(records, arguments.mode))
                if arguments.output is not None:  # after every case, so that nothing is lost to a later one
                    run.write(arguments.output)
    except DeviceLost as error:
        console.print(f"The device is lost to this process, and the rest is not measured: {error}")
        return 1
    if arguments.output is not None and run.records:
        from liger_trainer.benchmarks.plots import draw

        console.print(*(f"wrote {file}" for file in draw(run, arguments.output, arguments.mode)), sep="\n")
    return 0


def make_console() -> Console:
    """A console as wide as the tables need."""
    from rich.console import Console

    return Console(width=None if Console().is_terminal else 160, highlight=False)


def model_names(wanted: list[str] | None, device: Device) -> list[str]:
    """The models asked for, or one that suits the device."""
    from liger_trainer.benchmarks.models import MODELS
    from liger_trainer.benchmarks.registry import closest

    return [closest(name, MODELS, "model") for name in wanted or ["tiny" if device.module is None else "llama3-8b"]]


def find_device(name: str | None) -> torch.device:
    """The device asked for, or the best there is.

    Raises:
        BenchmarkError: if this machine has none of the name.
    """
    import torch

    from liger_trainer.benchmarks.registry import BenchmarkError

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BenchmarkError(f"No device {name!r}.") from None
    if device.type != "cpu" and (accelerator is None or device.type != accelerator.type):
        raise BenchmarkError(f"This machine has no {name!r}; it has {accelerator or 'no accelerator'}.")
    return device
