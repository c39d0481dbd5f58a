"""``liger-trainer keys``: the keys of a recipe, one a line."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.run_recipe import prepare_libraries


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "keys",
        help="the keys of a recipe: type, default and meaning",
        description="Lists the keys of the recipes of one trainer, one a line: name, type or values, default, and a "
        "sentence. Each is also an option of `liger-trainer train`.",
    )
    parser.add_argument("trainer", metavar="TRAINER", nargs="?", default="sft", help="the recipe's `trainer` (sft)")
    parser.set_defaults(function=keys)


def keys(arguments: Namespace, _: Sequence[str]) -> int:
    """Lists the keys of ``arguments.trainer``; returns the exit code."""
    prepare_libraries()
    from liger_trainer.recipe.keys import keys_of
    from liger_trainer.recipe.schema import TRAINERS

    if arguments.trainer not in TRAINERS:
        raise UserError(f"TRAINER is {arguments.trainer!r}; it must be one of {', '.join(TRAINERS)}.")
    for group, declared in keys_of(arguments.trainer).items():
        print(f"\n{group}")
        width = max(len(key.name) for key in declared)
        for key in declared:
            print(f"  {key.name:<{width}}  {key.type} ({key.default}): {key.meaning}")
    return 0
