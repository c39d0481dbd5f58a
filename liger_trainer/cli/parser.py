"""The ``liger-trainer`` command and its subcommands."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from liger_trainer._version import __version__
from liger_trainer.cli import bench, chat, compare, merge, plan
from liger_trainer.cli.argument_types import positive
from liger_trainer.errors import UserError

EXAMPLES = """examples:
  liger-trainer train quickstart                              train a small model on text that ships with Python
  liger-trainer train llama3_8b_sft --smoke                   try a recipe offline: a tiny model, generated data
  liger-trainer train my.yaml --learning_rate 2e-5            your own recipe, with one value changed
  liger-trainer train my.yaml --accelerate_config fsdp2       on all GPUs of this machine
  liger-trainer plan llama3_8b_sft --gpus 4 --gpu_memory 80GB the memory it takes, and the fastest way that fits
  liger-trainer merge outputs/lora                            the adapters of a run in the weights of its model
  liger-trainer chat outputs/lora                             talk to the model of a run
  liger-trainer compare llama3_8b_sft --smoke                 the stock trainer against ours, with a verdict
  liger-trainer doctor my.yaml                                its silent traps, each with its fix, before a run
  liger-trainer inspect Qwen/Qwen3-8B                         what would be accelerated; nothing is trained
  liger-trainer bench rms_norm --model llama3-8b              compare an operation with other libraries here
"""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="liger-trainer",
        description="Fast, small-memory fine-tuning inside the Hugging Face stack.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"liger-trainer {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    train = commands.add_parser(
        "train",
        help="train a recipe",
        description="Trains a recipe. Every key of the recipe is also an option, which wins over the file.",
        usage="liger-trainer train RECIPE [--smoke] [--accelerate_config NAME] [--num_processes N] [--key value ...]",
        allow_abbrev=False,
    )
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a shipped recipe")
    train.add_argument(
        "--smoke",
        action="store_true",
        help="a few offline steps of a tiny random model of the same family, on generated data",
    )
    train.add_argument(
        "--accelerate_config",
        metavar="NAME",
        help="single_gpu, ddp, fsdp1, fsdp2, zero2, zero3, or the path of an accelerate configuration",
    )
    train.add_argument(
        "--num_processes",
        type=positive,
        metavar="N",
        help="processes to start; default: one for each GPU of this machine",
    )
    train.add_argument("--debug", action="store_true", help="show the whole traceback of an error")

    doctor = commands.add_parser(
        "doctor",
        help="what runs here, what does not, and why; or the silent traps of a recipe",
        description="Checks versions, devices and known problems. With a model or a recipe, finds its silent traps, "
        "each with its fix, from the configuration, the tokenizer and the first rows of the data; no weights are "
        "loaded. Keys of the recipe are also options. The exit code is 1 if there are any.",
        usage="liger-trainer doctor [MODEL_OR_RECIPE] [--smoke] [--key value ...]",
        allow_abbrev=False,
    )
    doctor.add_argument(
        "subject",
        metavar="MODEL_OR_RECIPE",
        nargs="?",
        help="a YAML file, the name of a shipped recipe, a Hub id, a model folder, or a config.json",
    )
    doctor.add_argument("--smoke", action="store_true", help="check what `train --smoke` would train, offline")
    doctor.add_argument("--debug", action="store_true", help="show the whole traceback of an error")

    inspect = commands.add_parser(
        "inspect",
        help="what would be accelerated in a model",
        description="Builds a model without its weights and shows which kernels it would get. Nothing is trained.",
    )
    inspect.add_argument("model", metavar="MODEL", help="a Hub id, a model folder, a config.json, or a recipe")
    inspect.add_argument(
        "--liger_kernel_config", metavar="JSON", help="switches by component, such as '{\"rope\": false}'"
    )
    inspect.add_argument("--trust_remote_code", action="store_true", help="run code that comes with the model")
    inspect.add_argument("--debug", action="store_true", help="show the whole traceback of an error")

    recipes = commands.add_parser(
        "recipes", help="the shipped recipes", description="Lists the shipped recipes, or copies one to change it."
    )
    recipes.add_argument("name", nargs="?", help="a recipe to copy into the current folder")

    plan.add_parser(commands)
    merge.add_parser(commands)
    chat.add_parser(commands)
    compare.add_parser(commands)
    bench.add_parser(commands)
    return parser


def run(argv: Sequence[str]) -> int:
    """Parses `argv` and runs the subcommand.

    Returns:
        The exit code: 0, or 2 after an error that the user can correct, which is printed as one line; of `doctor`, 1
        for what it found.
    """
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    takes_keys = arguments.command in ("train", "plan", "compare") or getattr(arguments, "subject", None) is not None
    if rest and not takes_keys:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    missing = next((name for name in ("packaging", "rich", "yaml") if importlib.util.find_spec(name) is None), None)
    try:
        if missing:
            raise UserError(f"The command line needs `{missing}`: pip install 'liger-trainer[train]'")
        return _run_command(arguments, rest, argv)
    except UserError as error:
        if getattr(arguments, "debug", False):
            raise
        print(f"liger-trainer: {error}", file=sys.stderr)
        return 2


def _run_command(arguments: argparse.Namespace, rest: list[str], argv: Sequence[str]) -> int:
    need_all_libraries = ("train", "plan", "inspect", "compare", "merge", "chat")
    if arguments.command in need_all_libraries or getattr(arguments, "subject", None) is not None:
        from liger_trainer.cli.doctor import unmet_requirement

        unmet = unmet_requirement()
        if unmet is not None:
            raise UserError(unmet)
    if arguments.command == "train":
        from liger_trainer.cli.train import train

        return train(arguments, rest)
    if arguments.command == "plan":
        return plan.plan(arguments, rest)
    if arguments.command == "compare":
        return compare.compare(arguments, rest)
    if arguments.command == "doctor" and arguments.subject is not None:
        from liger_trainer.cli.diagnose import diagnose

        return diagnose(arguments, rest)
    if arguments.command == "doctor" and arguments.smoke:
        raise UserError("`--smoke` needs a recipe: liger-trainer doctor RECIPE --smoke")
    if arguments.command == "doctor":
        from liger_trainer.cli.doctor import doctor

        return doctor()
    if arguments.command == "inspect":
        from liger_trainer.cli.inspect import inspect

        return inspect(arguments)
    if arguments.command == "merge":
        return merge.merge(arguments)
    if arguments.command == "chat":
        return chat.chat(arguments)
    if arguments.command == "bench":
        return bench.bench(arguments, argv)
    from liger_trainer.cli.recipes import recipes

    return recipes(arguments.name)
