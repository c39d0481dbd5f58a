"""``liger-trainer compare``: the stock trainer against ours, with a verdict."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.argument_types import positive
from liger_trainer.tools.cli.run_recipe import prepare_libraries

if TYPE_CHECKING:
    from liger_trainer.tools.comparing.request import Request
    from liger_trainer.tools.comparing.results import Comparison

STEPS, SMOKE_STEPS = 20, 5
_SHOWN = 8  # parts of the model in the terminal


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "compare",
        help="the stock trainer against ours, with a verdict",
        description="Trains a few steps with the stock trainer, with the stock trainer and its sums in another order, "
        "and with ours, from the same weights, data order and seed. Compares losses and gradients, and shows speed and "
        "memory. The exit code is 0 if ours agrees with stock, and 1 if it differs. Keys of the recipe are also "
        "options.",
        usage="liger-trainer compare RECIPE [--steps N] [--output_dir DIR] [--smoke] [--key value ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a YAML file, the name of a shipped recipe, or a model to fine-tune on text"
    )
    parser.add_argument(
        "--steps", type=positive, metavar="N", help=f"steps of each run (default: {STEPS}, with --smoke {SMOKE_STEPS})"
    )
    parser.add_argument(
        "--output_dir",
        metavar="DIR",
        help="a new folder for the results; default: outputs/compare_RECIPE, with --smoke a temporary one",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a tiny random model of the same family, on generated data, offline"
    )
    parser.set_defaults(function=compare)


def compare(arguments: Namespace, options: Sequence[str]) -> int:
    """Compares ``arguments.recipe`` with the `options` that win over it.

    Returns:
        0 if ours agrees with stock, 1 if it differs, 130 after Ctrl-C.
    """
    _check_launch()
    prepare_libraries(offline=arguments.smoke)
    from liger_trainer.tools.comparing.request import WARM_START, values_of
    from liger_trainer.tools.comparing.results import Comparison, judge, run_sides, write_json, write_page
    from liger_trainer.tools.comparing.side import STOCK
    from liger_trainer.tools.diagnosis.sample import converted_rows

    request = _request(arguments, options)
    values, source, notes = values_of(request)  # mistakes are found before a folder is made
    if values["model_name_or_path"] != str(request.work / WARM_START):  # else its tokenizer is not there yet
        converted_rows(values, source)
    folder = _make(request.folder)
    try:
        runs = run_sides(request, lambda text: print(f"liger-trainer: {text}", file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print(f"\nliger-trainer: interrupted; the logs of the runs are in {folder}.", file=sys.stderr)
        return 128 + signal.SIGINT
    if runs[STOCK].generated:
        notes.append("Completions are those of the stock run, in every run: generation is not compared.")
    if runs[STOCK].dropped:
        dropped = ", ".join(f"{name}: {value!r}" for name, value in runs[STOCK].dropped.items())
        notes.append(f"The stock runs lack our arguments {dropped}.")
    found = Comparison(request, f"{source.stem}, {values['trainer']}", runs, judge(runs), notes)
    _show(found)
    for file in (write_json(found), write_page(found)):
        print(file)
    print(f"The logs of the runs are in {folder}.")
    return 0 if found.verdict.agrees else 1


def _check_launch() -> None:
    """Refuses several processes, and several GPUs, on which one process would run `nn.DataParallel`."""
    from liger_trainer.tools.cli.train import count_gpus

    if "RANK" in os.environ:
        raise UserError("`compare` was started by a launcher; it starts its own processes: run it by itself.")
    if count_gpus() > 1:
        raise UserError(
            f"`compare` runs on one GPU, and this process sees {count_gpus()}; set CUDA_VISIBLE_DEVICES=0, for example."
        )


def _request(arguments: Namespace, options: Sequence[str]) -> Request:
    from liger_trainer.tools.comparing.request import Request

    if arguments.output_dir is not None:
        folder = Path(arguments.output_dir)
    elif arguments.smoke:
        folder = Path(tempfile.gettempdir()) / f"liger-trainer-compare-{os.getpid()}"
    else:
        folder = Path("outputs") / f"compare_{Path(arguments.recipe).stem}"
    steps = arguments.steps or (SMOKE_STEPS if arguments.smoke else STEPS)
    return Request(arguments.recipe, tuple(options), steps, arguments.smoke, folder)


def _make(folder: Path) -> Path:
    """Creates the folder of the results, which must be new or empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        empty = not any(folder.iterdir())
    except OSError as error:
        raise UserError(
            f"`--output_dir` {str(folder)!r} cannot be created: {error.strerror}; give another folder."
        ) from error
    if not empty:
        raise UserError(
            f"`--output_dir` {str(folder)!r} is not empty, and nothing in it is overwritten; give another folder."
        )
    return folder


def _show(found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    from liger_trainer.tools.comparing import results
    from liger_trainer.tools.comparing.results import RULE

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    verdict = found.verdict
    parts = verdict.parts[:_SHOWN]

    def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        table = Table(title=title, title_justify="left")
        for place, name in enumerate(header):
            table.add_column(name, justify="right" if place else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    title = f"{found.title}: differences from stock (gradients of the {len(parts)} parts that differ most)"
    show(title, results.DIFFERENCE_HEADER, [results.difference_row(one) for one in (*verdict.curves, *parts)])
    show("Speed and memory", results.COST_HEADER, results.cost_rows(found.runs))
    for line in (*results.cost_notes(found.runs), *found.notes, *verdict.reasons[:_SHOWN], RULE):
        console.print(line, markup=False)
    console.print(found.headline, style="bold green" if verdict.agrees else "bold red", markup=False)
