"""The ``liger-trainer`` command and its subcommands."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from liger_trainer._version import __version__
from liger_trainer.errors import UserError
from liger_trainer.tools.cli import (
    bench,
    chat,
    compare,
    data,
    diagnose,
    doctor,
    export_adapter,
    inspect,
    keys,
    merge,
    new,
    plan,
    recipes,
    train,
    warm,
)
from liger_trainer.tools.cli.run_recipe import interrupted, quiet_bitsandbytes

EXAMPLES = """examples:
  liger-trainer train quickstart                              train a small model on text that ships with Python
  liger-trainer train llama3_8b_sft --smoke                   try a recipe offline: a tiny model, generated data
  liger-trainer train my.yaml --learning_rate 2e-5            your own recipe, with one value changed
  liger-trainer train my.yaml --accelerate_config fsdp2       on all GPUs of this machine
  liger-trainer new my.yaml --model Qwen/Qwen3-0.6B           a commented recipe for your data, goal and card
  liger-trainer keys grpo                                     the keys of a recipe, with types and defaults
  liger-trainer data my.jsonl --model Qwen/Qwen3-0.6B         rows as the model will see them: tokens and labels
  liger-trainer plan llama3_8b_sft --gpus 4 --gpu_memory 80GB the memory it takes, and the fastest way that fits
  liger-trainer warm llama3_8b_sft                            compile its kernels ahead of a run
  liger-trainer merge outputs/lora                            the adapters of a run in the weights of its model
  liger-trainer export-adapter outputs/lora --layout per-expert  adapters on experts as vLLM reads them
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

    for command in (
        train,
        new,
        keys,
        data,
        plan,
        warm,
        compare,
        diagnose,
        inspect,
        merge,
        export_adapter,
        chat,
        bench,
        recipes,
    ):
        command.add_parser(commands)
    for known in commands.choices.values():
        known.add_argument("--debug", action="store_true", help="show the whole traceback of an error")
    return parser


def run(argv: Sequence[str]) -> int:
    """Parses `argv` and runs the subcommand.

    Returns:
        The exit code: 0, or 2 after an error that the user can correct, which is printed as one line; of `doctor`, 1
        for what it found.
    """
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    arguments.argv = list(argv)
    diagnosed = getattr(arguments, "subject", None) is not None
    if rest and not (arguments.command in ("train", "data", "plan", "warm", "compare") or diagnosed):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    quiet_bitsandbytes()
    missing = next((name for name in ("packaging", "rich", "yaml") if importlib.util.find_spec(name) is None), None)
    try:
        if missing:
            raise UserError(f"The command line needs `{missing}`: pip install 'liger-trainer[train]'")
        if arguments.command not in ("doctor", "bench", "recipes") or diagnosed:
            unmet = doctor.unmet_requirement()
            if unmet is not None:
                raise UserError(unmet)
        return arguments.function(arguments, rest)
    except KeyboardInterrupt:
        if arguments.debug:
            raise
        return interrupted()
    except UserError as error:
        if arguments.debug:
            raise
        print(f"liger-trainer: {error}", file=sys.stderr)
        return 2
