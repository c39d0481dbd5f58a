"""The recipe of the stock run: TRL's own trainer and configuration, with the arguments that they have."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.load import Recipe, build_recipe
from liger_trainer.recipe.schema import TrainerKind

_SHARED = ("optim", "logging_nan_inf_filter", "activation_offloading")
"""Arguments that our configurations declare and the stock ones have with the same meaning."""
_OF_THE_DEVICE = ("use_cpu", "bf16", "dataloader_pin_memory")
"""Arguments for which our configurations choose a value that fits the device."""


class StockKind(TrainerKind):
    """A row of `TRAINERS` with the classes that ours are made from."""

    @property
    def trainer_class(self) -> Any:
        """TRL's or transformers' trainer."""
        return stock_class(super().trainer_class)

    @property
    def config_class(self) -> Any:
        """The class of its arguments."""
        return stock_class(super().config_class)


class StockRecipe(Recipe):
    """A recipe that builds the stock trainer."""

    @property
    def kind(self) -> StockKind:
        """What its ``trainer`` stands for, without us."""
        return StockKind(**vars(super().kind))


def stock_class(ours: type) -> type:
    """The nearest base of one of our trainers or configurations that is not of this package and is of the same kind."""
    from transformers import Trainer, TrainingArguments

    bases = (base for base in ours.__mro__ if not base.__module__.startswith("liger_trainer."))
    return next(base for base in bases if issubclass(base, Trainer | TrainingArguments))


def own_arguments(ours: type) -> set[str]:
    """The arguments that the stock configuration lacks, or that mean something else in ours."""
    stock = {field.name for field in dataclasses.fields(stock_class(ours))}  # type: ignore[arg-type]
    of_us = (vars(base).get("__annotations__", {}) for base in ours.__mro__ if _is_ours(base))
    declared = {name for names in of_us for name in names}
    fields = {field.name for field in dataclasses.fields(ours)}  # type: ignore[arg-type]
    return (fields - stock) | (declared - set(_SHARED))


def _is_ours(base: type) -> bool:
    return base.__module__.startswith("liger_trainer.")


def stock_recipe(values: Mapping[str, Any], source: Path) -> tuple[StockRecipe, dict[str, Any]]:
    """Builds the stock run's recipe from the checked values of ours.

    Returns:
        The recipe, and the arguments of ours that were dropped, if they have another value than their default.
    """
    ours = build_recipe(values, source)
    kind = StockKind(**vars(ours.kind))
    own = own_arguments(type(ours.training))
    names = {field.name for field in dataclasses.fields(kind.config_class) if field.init} - own
    chosen = {name: values[name] for name in names if name in values}
    chosen |= {name: getattr(ours.training, name) for name in _OF_THE_DEVICE}
    try:
        training = kind.config_class(**chosen, use_liger_kernel=False)
    except (ValueError, TypeError, ImportError) as error:
        raise RecipeError(f"{source}: {kind.config_class.__name__} refuses the recipe: {first_line(error)}") from error
    fields = {field.name: getattr(ours, field.name) for field in dataclasses.fields(Recipe)}
    dropped = {
        field.name: values[field.name]
        for field in dataclasses.fields(type(ours.training))
        if field.name in own and field.name in values and values[field.name] != field.default
    }
    return StockRecipe(**{**fields, "training": training}), dropped
