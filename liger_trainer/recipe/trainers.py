"""What each ``trainer`` of a recipe stands for: its classes, its keys, and the columns its data must have."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

TEXT_FIELD = "dataset_text_field"
"""Stands, among the columns of a trainer, for the column that this key of the recipe names."""


@dataclasses.dataclass(frozen=True)
class TrainerKind:
    """One value of ``trainer``.

    Args:
        name: The classes are ``Liger{name}Trainer`` and ``Liger{name}Config``.
        data: The kind of rows, as `smoke_data` generates them.
        columns: What the data must have: the columns of one of these alternatives.
        arguments: A further dataclass of keys in `liger_trainer.configs.recipe_arguments`.
        from_folder: Whether the trainer loads its model, or a reference beside it, from a folder or the Hub, so that a
            new model has to be written down first.
    """

    name: str
    data: str
    columns: tuple[tuple[str, ...], ...]
    arguments: str | None = None
    from_folder: bool = True

    @property
    def trainer_class(self) -> Any:
        """The trainer."""
        return getattr(importlib.import_module("liger_trainer"), f"Liger{self.name}Trainer")

    @property
    def config_class(self) -> Any:
        """Its arguments."""
        name = f"Liger{self.name}Config" if self.name else "LigerTrainingArguments"
        return getattr(importlib.import_module("liger_trainer"), name)


_MESSAGES = (("messages",), ("conversations",), ("prompt", "completion"), ("input_ids",), (TEXT_FIELD,))
_PAIRS = (("chosen", "rejected"),)
_LABELLED = (("prompt", "completion", "label"), ("chosen", "rejected"))

TRAINERS = {
    "sft": TrainerKind("SFT", "messages", _MESSAGES, from_folder=False),
    "causal_lm": TrainerKind("", "text", ((TEXT_FIELD,),), "CausalLMArguments", from_folder=False),
    "dpo": TrainerKind("DPO", "preference", _PAIRS),
    "kto": TrainerKind("KTO", "unpaired", _LABELLED),
    "orpo": TrainerKind("ORPO", "preference", _PAIRS),
    "cpo": TrainerKind("CPO", "preference", _PAIRS),
    "grpo": TrainerKind("GRPO", "prompt", (("prompt",),), "RewardArguments"),
    "rloo": TrainerKind("RLOO", "prompt", (("prompt",),), "RewardArguments"),
    "reward": TrainerKind("Reward", "preference", _PAIRS),
}


def argument_classes(trainer: str) -> tuple[type, ...]:
    """The dataclasses whose fields are the keys of a recipe for `trainer`; a `Recipe` holds one of each."""
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

    from liger_trainer.configs import recipe_arguments

    kind = TRAINERS[trainer]
    more = (getattr(recipe_arguments, kind.arguments),) if kind.arguments else ()
    common = (recipe_arguments.RecipeArguments, ScriptArguments, DatasetMixtureConfig, ModelConfig)
    return (*common, kind.config_class, *more)
