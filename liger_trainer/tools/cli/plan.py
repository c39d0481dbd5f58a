"""``liger-trainer plan``: the memory a recipe takes on each GPU, and the fastest setting that fits."""

from __future__ import annotations

import shlex
import shutil
import warnings
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.argument_types import card, memory_size, network, positive

if TYPE_CHECKING:
    from liger_trainer.plan.cluster import Cluster
    from liger_trainer.tools.planning.cards import Card
    from liger_trainer.tools.planning.inputs import Inputs
    from liger_trainer.tools.planning.report import Plan


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="how much memory a recipe takes, and how to run it",
        description="Estimates the memory of each GPU and the time of a step from the model's configuration, without "
        "its weights, for every way to split and recompute, and names the fastest that fits. Keys of the recipe are "
        "also options.",
        usage="liger-trainer plan RECIPE --gpus N [--hosts N] [--network 400Gb/s] [--card H100] [--gpu_memory 141GB] "
        "[--smoke] [--key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--gpus", type=positive, required=True, metavar="N", help="GPUs to train on, of all hosts")
    parser.add_argument(
        "--hosts", type=positive, default=1, metavar="N", help="machines that have them, as many in each (default: 1)"
    )
    parser.add_argument(
        "--network",
        type=network,
        metavar="RATE",
        help="what a GPU sends to other hosts in one direction, such as 400Gb/s or 50GB/s, or all GPUs of a host "
        "together, such as 3.2Tb/s/host; default: as the card's vendor builds hosts",
    )
    parser.add_argument(
        "--card",
        type=card,
        metavar="NAME",
        help="the kind of GPU, whose rates and links count; default: the first GPU here if it is known, or H100",
    )
    parser.add_argument(
        "--gpu_memory",
        type=memory_size,
        metavar="SIZE",
        help="memory of each GPU, such as 80GB or 24GiB; default: that of `--card`, of the first GPU here, or 80GB",
    )
    parser.add_argument(
        "--prompt_length",
        type=positive,
        default=512,
        metavar="N",
        help="tokens of a prompt, for GRPO and RLOO, whose recipes do not set it (default: 512)",
    )
    parser.add_argument("--smoke", action="store_true", help="plan the tiny model of `train --smoke`, offline")
    parser.set_defaults(function=plan)


def plan(arguments: Namespace, options: Sequence[str]) -> int:
    """Prints the plan of ``arguments.recipe`` with the `options` that win over it; returns the exit code."""
    warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing", FutureWarning)
    from liger_trainer.tools.planning.cards import cluster_of
    from liger_trainer.tools.planning.inputs import read_inputs
    from liger_trainer.tools.planning.report import make_plan

    kind, size = _gpu(arguments)
    cluster = cluster_of(kind, arguments.gpus, arguments.hosts, arguments.network)
    inputs = read_inputs(arguments.recipe, options, arguments.gpus, arguments.smoke, arguments.prompt_length)
    _show(arguments, options, inputs, make_plan(inputs, cluster, size), kind, size)
    return 0


def _show(arguments: Namespace, options: Sequence[str], inputs: Inputs, found: Plan, kind: Card, size: int) -> None:
    from rich.console import Console

    from liger_trainer.tools.planning import report
    from liger_trainer.tools.planning.cards import MEASURED

    console = Console(width=shutil.get_terminal_size((160, 24)).columns, highlight=False)
    hosts = f" in {arguments.hosts} hosts" if arguments.hosts > 1 else ""
    title = f"{inputs.source.name}, GiB a GPU on {arguments.gpus} × {size / report.GIB:.1f} GiB{hosts}"
    console.print(report.parameters_line(inputs.run.parameters), markup=False)
    console.print(report.attention_line(inputs.run), markup=False)
    table = report.memory_table(found, title)
    narrow = console.measure(table, options=console.options.update(max_width=1000)).maximum > console.width
    if arguments.hosts == 1:
        console.print(report.memory_table(found, title, parts=False) if narrow else table)
    if arguments.hosts > 1 or narrow:
        console.print(report.parts_of(found), markup=False)
    if arguments.gpus > 1:
        console.print(report.layout_table(found, f"{title}; a GPU's messages of a step, at the rates of {kind.name}"))
        if refused := report.not_proposed(inputs):
            console.print(refused, markup=False)
    if rows := report.activation_memory_rows(inputs.run, found):
        console.print(report.activation_memory_table(inputs.run, rows))
    for note in inputs.notes:
        console.print(note, markup=False)
    if found.best is None:
        raise UserError(_too_big(arguments, inputs, found.cluster, size))
    console.print(report.recommendation(inputs, found, found.best), markup=False)
    console.print(report.speed_of(found, found.best, kind.name, kind.name in MEASURED), markup=False)
    setting = found.best.setting
    if setting.tensor_parallel_size > 1:
        console.print(report.how_to_load(inputs, setting), markup=False)
        return
    command = shlex.join(report.command(inputs, setting, arguments.recipe, options, arguments.hosts))
    for name in ("MACHINE_RANK", "MAIN_HOST"):  # which the shell has
        command = command.replace(f"'${name}'", f'"${name}"')
    console.print(f"\n  {command}", soft_wrap=True, markup=False)


def _too_big(arguments: Namespace, inputs: Inputs, cluster: Cluster, size: int) -> str:
    from liger_trainer.tools.planning.report import GIB, gpus_that_fit, least, room_of, way

    row = least(inputs, cluster)
    if row.memory.total <= room_of(size, inputs.run):
        return (
            f"Nothing fits on {arguments.gpus} × {size / GIB:.1f} GiB with `activation_memory: "
            f"{inputs.values['activation_memory']}`; give a smaller size, or 'auto' for what the GPU has left."
        )
    needed = row.memory.total / room_of(1.0, inputs.run)
    gpus = gpus_that_fit(inputs, cluster, size)
    adapters = "" if inputs.values["use_peft"] else ", `--use_peft true`"
    more = f", or {gpus} GPUs of this size" if gpus else ""
    return (
        f"Nothing fits on {arguments.gpus} × {size / GIB:.1f} GiB. The least is {way(row.setting)}, batch "
        f"{row.setting.batch}, with {row.memory.total / GIB:.1f} GiB: take GPUs of at least {needed / GIB:.1f} GiB"
        f"{more}{adapters}, or shorter sequences."
    )


def _gpu(arguments: Namespace) -> tuple[Card, int]:
    """The kind of the GPUs, and their memory: as given, else those of the first GPU here, else an H100's."""
    import torch

    from liger_trainer.tools.planning.cards import DEFAULT_CARD, card_named

    here = torch.cuda.get_device_properties(0) if torch.cuda.is_available() and arguments.card is None else None
    kind = arguments.card or (card_named(here.name) if here else None) or DEFAULT_CARD
    return kind, arguments.gpu_memory or (int(here.total_memory) if here else kind.size)
