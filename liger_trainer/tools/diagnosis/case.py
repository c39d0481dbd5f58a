"""What is checked, and what a check finds.

A case is the keys of a recipe, or of a model as if it were one, and the configuration of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe.file import RecipeError, find_recipe, first_line, read_recipe, shipped_recipes
from liger_trainer.recipe.load import check_values
from liger_trainer.recipe.model import config_of_values
from liger_trainer.recipe.schema import TRAINERS, TrainerKind
from liger_trainer.recipe.smoke import shrink
from liger_trainer.tools.planning.inputs import build_on_meta

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclasses.dataclass(frozen=True)
class Trap:
    """A mistake that training would not report."""

    what: str  # the mistake, and why nothing shows it
    fix: str  # keys of a recipe that correct it

    def __str__(self) -> str:
        return f"{self.what}. Fix: {self.fix}."


class CannotCheckError(Exception):
    """Something could not be looked at; the text says why."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A recipe, or a model that is going to be fine-tuned."""

    source: Path  # the recipe's file, or the model, for messages
    # All keys of the recipe, checked; for a model, those of ``trainer: "sft"`` with that model.
    values: Mapping[str, Any]
    config: PreTrainedConfig  # the configuration of the model
    is_model: bool  # whether a model was given, and no recipe

    @property
    def kind(self) -> TrainerKind:
        """What its trainer is."""
        return TRAINERS[self.values["trainer"]]

    @cached_property
    def model_and_dtype(self) -> tuple[Any, Any]:
        """The model on the meta device, with its adapters, and the dtype of its weights."""
        try:
            return build_on_meta(self.values, self.config)
        except (ValueError, AttributeError, TypeError) as error:
            raise RecipeError(f"{self.source}: {first_line(error)}") from error

    def having(self, **settings: Any) -> Case:
        """The same case with other values."""
        return dataclasses.replace(self, values={**self.values, **settings})


def read_case(name: str, overrides: Sequence[str] = (), smoke: bool = False) -> Case:
    """Reads a recipe or, by a Hub id, a folder or a ``config.json``, a model's configuration; no weights.

    Options of the command line (`overrides`) win over the file.
    """
    is_model = Path(name).suffix not in (".yaml", ".yml") and (name not in shipped_recipes() or Path(name).exists())
    source = Path(name) if is_model else find_recipe(name)
    written = {"trainer": "sft", "model_name_or_path": name} if is_model else read_recipe(source)
    values, given = check_values(written, overrides, source)
    if smoke:
        values = shrink(values, given)
    return Case(source, values, config_of_values(values, source, packaged=True), is_model)
