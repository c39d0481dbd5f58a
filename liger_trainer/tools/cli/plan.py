"""``liger-trainer plan``: the memory a recipe takes on each GPU, and the fastest setting that fits."""

from __future__ import annotations

import shlex
import shutil
import warnings
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.argument_types import memory_size, positive

if TYPE_CHECKING:
    from liger_trainer.tools.planning.inputs import Inputs
    from liger_trainer.tools.planning.report import Plan

DEFAULT_GPU_MEMORY = "80GB"


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "plan",
        help="how much memory a recipe takes, and how to run it",
        description="Estimates the memory of each GPU from the model's configuration, without its weights, for every "
        "way to split and recompute, and names the fastest that fits. Keys of the recipe are also options.",
        usage="liger-trainer plan RECIPE --gpus N [--gpu_memory 141GB] [--smoke] [--key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    parser.add_argument("--gpus", type=positive, required=True, metavar="N", help="GPUs to train on")
    parser.add_argument(
        "--gpu_memory",
        type=memory_size,
        metavar="SIZE",
        help=f"memory of each GPU, such as 80GB or 24GiB; default: that of the first GPU here, or {DEFAULT_GPU_MEMORY}",
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
    from liger_trainer.tools.planning.inputs import read_inputs
    from liger_trainer.tools.planning.report import make_plan

    gpus, size = arguments.gpus, arguments.gpu_memory or _gpu_memory_here()
    inputs = read_inputs(arguments.recipe, options, gpus, arguments.smoke, arguments.prompt_length)
    _show(arguments, options, inputs, make_plan(inputs, gpus, size), size)
    return 0


def _show(arguments: Namespace, options: Sequence[str], inputs: Inputs, found: Plan, size: int) -> None:
    from rich.console import Console

    from liger_trainer.tools.planning import report
    from liger_trainer.tools.planning.report import activation_memory_rows

    console = Console(width=shutil.get_terminal_size((160, 24)).columns, highlight=False)
    title = f"{inputs.source.name}, GiB a GPU on {arguments.gpus} × {size / report.GIB:.1f} GiB"
    console.print(report.parameters_line(inputs.run.parameters), markup=False)
    console.print(report.attention_line(inputs.run), markup=False)
    table = report.memory_table(found, title)
    narrow = console.measure(table, options=console.options.update(max_width=1000)).maximum > console.width
    console.print(report.memory_table(found, title, parts=False) if narrow else table)
    if narrow:
        console.print(report.parts_of(found), markup=False)
    if rows := activation_memory_rows(inputs.run, found):
        console.print(report.activation_memory_table(inputs.run, rows))
    for note in inputs.notes:
        console.print(note, markup=False)
    if found.best is None:
        raise UserError(_too_big(arguments, inputs, size))
    console.print(report.recommendation(inputs, found, found.best), markup=False)
    command = shlex.join(report.command(inputs, found.best.setting, arguments.recipe, options))
    console.print(f"\n  {command}", soft_wrap=True, markup=False)


def _too_big(arguments: Namespace, inputs: Inputs, size: int) -> str:
    from liger_trainer.tools.planning.report import GIB, gpus_that_fit, least, room_of, way

    row = least(inputs, arguments.gpus)
    if row.memory.total <= room_of(size, inputs.run):
        return (
            f"Nothing fits on {arguments.gpus} × {size / GIB:.1f} GiB with `activation_memory: "
            f"{inputs.values['activation_memory']}`; give a smaller size, or 'auto' for what the GPU has left."
        )
    needed = row.memory.total / room_of(1.0, inputs.run)
    gpus = gpus_that_fit(inputs, arguments.gpus, size)
    adapters = "" if inputs.values["use_peft"] else ", `--use_peft true`"
    more = f", or {gpus} GPUs of this size" if gpus else ""
    return (
        f"Nothing fits on {arguments.gpus} × {size / GIB:.1f} GiB. The least is {way(row.setting)}, batch "
        f"{row.setting.batch}, with {row.memory.total / GIB:.1f} GiB: take GPUs of at least {needed / GIB:.1f} GiB"
        f"{more}{adapters}, or shorter sequences."
    )


def _gpu_memory_here() -> int:
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return memory_size(DEFAULT_GPU_MEMORY)
