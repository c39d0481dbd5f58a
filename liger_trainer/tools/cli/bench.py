"""``liger-trainer bench``: operations compared with other libraries, training steps, and the longest sequence."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liger_trainer.tools.cli.argument_types import counts, names, positive, share, token_range

_ROUNDS, _QUICK_ROUNDS = 12, 5
_SECONDS, _QUICK_SECONDS = 60.0, 15.0
_QUICK_TOTAL_SECONDS = 420.0
_CPU_TOKENS = 128
_OF_OPERATIONS = ("tokens", "mode", "quick", "rounds", "no_accuracy")  # options that trainings have not


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "bench",
        help="time, memory and gradient error of operations, compared with other libraries",
        description="Measures operations with every installed provider, in turns: time of forward and backward, "
        "peak memory, gradient error against float64, and the share of what the machine could do. Without OPS, lists "
        "what can be measured. `training` measures Trainer steps, each provider in its own processes, one per GPU; "
        "`longest` looks for the longest sequence that each provider trains on, one process for each attempt. A value "
        "that an option is given twice counts once.",
    )
    parser.add_argument("operations", nargs="*", metavar="OPS", help="operations, `all`, `training` or `longest`")
    parser.add_argument("--model", type=names, metavar="NAME[,...]", help="whose shapes; default: llama3-8b")
    parser.add_argument("--tokens", type=counts, metavar="N[,...]", help="token counts; default: each operation's own")
    parser.add_argument("--providers", type=names, metavar="NAME[,...]", help="libraries to compare; default: all")
    parser.add_argument(
        "--provider_file", type=Path, metavar="FILE", help="Python file with `@provider` functions of your own"
    )
    parser.add_argument(
        "--mode",
        choices=["forward", "backward", "both"],
        default="both",
        help="which time percentages and plots show; all three are always measured",
    )
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of the inputs; for `training`, of the weights: float32 ones are trained under bf16 autocast",
    )
    parser.add_argument("--device", help="default: the accelerator, else cpu")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write results.json, results.csv and plots here")
    parser.add_argument(
        "--quick", action="store_true", help="fewer samples, 15 seconds per operation, 7 minutes in all"
    )
    parser.add_argument("--rounds", type=positive, metavar="N", help="samples of each provider; default: 12")
    parser.add_argument("--seconds", type=positive, metavar="S", help="time limit of an operation; default: 60")
    parser.add_argument("--no_accuracy", action="store_true", help="skip the comparison with float64")
    others = vars(parser.parse_args([]))
    training = parser.add_argument_group("training", "only for `bench training` and `bench longest`")
    training.add_argument(
        "--trainer",
        choices=["causal_lm", "sft", "dpo", "kto", "orpo", "cpo", "reward", "grpo", "rloo"],
        help="the Trainer or one of TRL's; default: causal_lm, dpo",
    )
    training.add_argument(
        "--batch",
        type=positive,
        metavar="N",
        help="sequences or pairs in a step on one GPU; default: 4, 1; with --group, two groups",
    )
    training.add_argument(
        "--length", type=counts, metavar="N[,...]", help="their tokens; default: 4096, 16384 (the first length to try)"
    )
    training.add_argument(
        "--lengths",
        type=token_range,
        metavar="LOW:HIGH",
        help="in place of --length, with alignment: draw each completion's tokens uniformly, such as 64:1024, or fix "
        "them, such as 512",
    )
    training.add_argument(
        "--prompt",
        type=positive,
        metavar="N",
        help="tokens before each completion of --lengths; kto and reward do without: --lengths are then of whole rows",
    )
    training.add_argument(
        "--group", type=positive, metavar="N", help="completions of a prompt, with --lengths, grpo or rloo; default: 8"
    )
    training.add_argument("--steps", type=positive, metavar="N", help="steps at each length; default: 6, 2")
    training.add_argument(
        "--warmup",
        type=int,
        choices=range(100),
        default=2,
        metavar="N",
        help="first steps that are not timed; default: 2",
    )
    training.add_argument(
        "--gpus", type=counts, metavar="N[,...]", help="numbers of GPUs, in turn; default: 1; not for `longest`"
    )
    training.add_argument(
        "--accelerate_config",
        metavar="NAME",
        help="ddp, fsdp2, ..., or an accelerate configuration file; default for several --gpus: fsdp2, or ddp on CPUs",
    )
    training.add_argument(
        "--expert_parallel",
        type=positive,
        default=1,
        metavar="N",
        help="GPUs that share a layer's experts, while FSDP2 splits the rest over all, under ddp; default: 1",
    )
    training.add_argument(
        "--context_parallel",
        type=positive,
        default=1,
        metavar="N",
        help="GPUs that have a part each of the same sequences, under fsdp2; default: 1",
    )
    training.add_argument("--layers", type=positive, default=0, metavar="N", help="layers of the model; default: all")
    training.add_argument("--lora", type=positive, default=0, metavar="R", help="rank of adapters; default: none")
    training.add_argument(
        "--quantize",
        type=names,
        metavar="FORMAT[,...]",
        help="with --lora, run on each of these bases: nf4 (bitsandbytes); fp8_blocks, fp8_rows, int4 or, for gpt-oss, "
        "mxfp4, which stay packed; bf16; default: bf16",
    )
    training.add_argument(
        "--documents",
        type=positive,
        default=0,
        metavar="N",
        help="pack the sequences from documents of N tokens, with causal_lm or sft; default: one document each",
    )
    training.add_argument(
        "--padding",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="make this share of the tokens padding on the right, such as 0.5, with causal_lm or sft; default: none",
    )
    training.add_argument(
        "--labelled",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="give this share of the tokens a label, such as 0.25, with causal_lm or sft; default: all",
    )
    training.add_argument(
        "--activation_memory",
        type=names,
        metavar="SIZE[,...]",
        help="run liger_trainer with each of these values of its argument, such as 0,8GiB,auto, and draw pareto.png",
    )
    training.add_argument(
        "--optim",
        type=names,
        metavar="NAME[,...]",
        help="run each provider with each of these optimizers that it has, such as adamw_torch_fused,liger_adamw; "
        "default: adamw_torch_fused",
    )
    training.add_argument("--no_checkpointing", action="store_true", help="no gradient checkpointing")
    defaults = vars(parser.parse_args([]))
    of_training = {name: default for name, default in defaults.items() if name not in others}
    of_operations = {name: default for name, default in others.items() if name in _OF_OPERATIONS}
    parser.set_defaults(
        function=lambda arguments, _: bench(arguments), of_training=of_training, of_operations=of_operations
    )


def bench(arguments: argparse.Namespace) -> int:
    """Measures the requested operations, or lists all of them; returns the exit code."""
    from liger_trainer.benchmarks.registry import BenchmarkError, load_operations

    load_operations(arguments.provider_file)
    command = shlex.join(["liger-trainer", *arguments.argv])
    if not arguments.operations:
        return _list_operations()
    arguments.operations = [*dict.fromkeys(arguments.operations)]
    if arguments.operations in (["training"], ["longest"]):
        from liger_trainer.tools.cli.bench_training import measure_training

        _refuse(arguments, arguments.of_operations, "operations")
        return measure_training(arguments, command)
    for name in ("training", "longest"):
        if name in arguments.operations:
            raise BenchmarkError(f"`{name}` is measured by itself; leave the other operations out.")
    _refuse(arguments, arguments.of_training, "`bench training`")
    return _measure(arguments, command)


def _refuse(arguments: argparse.Namespace, defaults: Mapping[str, Any], what: str) -> None:
    """Refuses options that are for `what` alone, and would be ignored.

    Args:
        arguments: The command line's.
        defaults: The options, with their defaults.
        what: The benchmarks that take them, for the message.

    Raises:
        BenchmarkError: If one has another value.
    """
    from liger_trainer.benchmarks.registry import BenchmarkError

    given = next((name for name, default in defaults.items() if getattr(arguments, name) != default), None)
    if given is not None:
        raise BenchmarkError(f"`--{given}` is for {what}; leave it out.")


def _list_operations() -> int:
    from rich.console import Console
    from rich.table import Table

    from liger_trainer.benchmarks.models import MODELS
    from liger_trainer.benchmarks.registry import OPERATIONS

    table = Table("operation", "what it is", "providers")
    for operation in OPERATIONS.values():
        table.add_row(operation.name, operation.description, ", ".join(operation.providers))
    console = Console()
    console.print(table)
    console.print(f"models: {', '.join(MODELS)}")
    console.print("training: Trainer steps of a whole model, each provider in its own processes")
    console.print("longest: the longest sequence that each provider trains on, one process for each attempt")
    return 0


def _measure(arguments: argparse.Namespace, command: str) -> int:
    import torch

    from liger_trainer.benchmarks.device import Device, find_device
    from liger_trainer.benchmarks.measure import DeviceLost, Settings, run_operation
    from liger_trainer.benchmarks.records import Machine, Run
    from liger_trainer.benchmarks.registry import OPERATIONS, choose_models, closest, family
    from liger_trainer.benchmarks.report import make_console, table

    names = [closest(name, [*OPERATIONS, "all", "training", "longest"], "operation") for name in arguments.operations]
    operations = [OPERATIONS[name] for name in (OPERATIONS if "all" in names else names)]
    libraries = dict.fromkeys(family(known) for operation in OPERATIONS.values() for known in operation.providers)
    device = Device(find_device(arguments.device))
    settings = Settings(
        models=tuple(choose_models(arguments.model, device.module is None)),
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
                if arguments.output is not None:  # after every case, so that a later failure loses nothing
                    run.write(arguments.output)
    except DeviceLost as error:
        console.print(f"This process has lost the device; the rest is not measured: {error}")
        return 1
    if arguments.output is not None and run.records:
        from liger_trainer.benchmarks.plots import draw

        console.print(*(f"wrote {file}" for file in draw(run, arguments.output, arguments.mode)), sep="\n")
    return 0
