"""``liger-trainer recipes``: lists the shipped recipes, or copies one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from liger_trainer.errors import UserError


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "recipes", help="the shipped recipes", description="Lists the shipped recipes, or copies one to change it."
    )
    parser.add_argument("name", nargs="?", help="a recipe to copy into the current folder")
    parser.set_defaults(function=lambda arguments, _: recipes(arguments.name))


def recipes(name: str | None) -> int:
    """Lists the shipped recipes with their first comment line, or copies recipe `name` into the current folder."""
    from liger_trainer.recipe.file import find_recipe, shipped_recipes

    if name is None:
        shipped = shipped_recipes()
        width = max(map(len, shipped))
        for known, file in shipped.items():
            print(f"{known:<{width}} {file.read_text(encoding='utf-8').splitlines()[0].lstrip('# ')}")
        return 0
    source = find_recipe(name)
    target = Path(source.name)
    if target.exists():
        raise UserError(f"{target} already exists and is not overwritten.")
    shutil.copyfile(source, target)
    print(f"Copied to {target}; change it, then: liger-trainer train {target}")
    return 0
