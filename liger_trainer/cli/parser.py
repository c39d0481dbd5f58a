"""The ``liger-trainer`` command and its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from liger_trainer._version import __version__

EXAMPLES = """examples:
  liger-trainer train quickstart                              train a small model on text that Python carries
  liger-trainer train llama3_8b_sft --smoke                   try a recipe: tiny model, generated data, offline
  liger-trainer train my.yaml --learning_rate 2e-5            a recipe of your own, with one value changed
  liger-trainer train my.yaml --accelerate_config fsdp2       on all GPUs of this machine
  liger-trainer plan llama3_8b_sft --gpus 4 --gpu_memory 80GB what memory that takes, and the fastest way that fits
  liger-trainer inspect Qwen/Qwen3-8B                         what would be accelerated, without training
  liger-trainer bench rms_norm --model llama3-8b              an operation beside other libraries, on this machine
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
        help="train what a recipe says",
        description="Trains what a recipe says. Every key of the recipe is an option too, and wins over the file.",
        usage="liger-trainer train RECIPE [--smoke] [--accelerate_config NAME] [--num_processes N] [--key value ...]",
        allow_abbrev=False,
    )
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the bare name of a shipped recipe")
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

    commands.add_parser(
        "doctor", help="what runs here, what does not, and why", description="Checks versions, devices and known traps."
    )

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

    from liger_trainer.cli import bench, plan

    plan.add_parser(commands)
    bench.add_parser(commands)
    return parser


def positive(text: str) -> int:
    """An argument that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def run(argv: Sequence[str]) -> int:
    """Parses `argv` and runs the subcommand; returns the exit code."""
    arguments, rest = make_parser().parse_known_args(argv)
    if rest and arguments.command not in ("train", "plan"):
        make_parser().error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command in ("train", "plan", "inspect"):
        from liger_trainer.cli.doctor import unmet_requirement

        unmet = unmet_requirement()
        if unmet is not None:
            return complain(unmet)
    if arguments.command == "train":
        from liger_trainer.cli.train import train

        return train(arguments, rest)
    if arguments.command == "plan":
        from liger_trainer.cli.plan import plan

        return plan(arguments, rest)
    if arguments.command == "doctor":
        from liger_trainer.cli.doctor import doctor

        return doctor()
    if arguments.command == "inspect":
        from liger_trainer.cli.inspect import inspect

        return inspect(arguments)
    if arguments.command == "bench":
        from liger_trainer.cli.bench import bench

        return bench(arguments, list(argv))
    from liger_trainer.cli.recipes import recipes

    return recipes(arguments.name)


def complain(message: object) -> int:
    """Prints one error message and returns the exit code for it."""
    print(f"liger-trainer: {message}", file=sys.stderr)
    return 2
