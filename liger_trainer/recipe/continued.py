"""What a run was started with, kept beside its checkpoints, and what another start changes of it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.load import Recipe

logger = logging.getLogger(__name__)

FILE = "recipe.json"

_KEPT = (  # keys with which another run would be trained
    *("trainer", "model_name_or_path", "model_config", "data_files", "dataset_name", "dataset_config"),
    *("columns", "roles", "prompt_template", "system_prompt", "max_length", "packing", "assistant_only_loss"),
    *("loss_type", "beta", "use_peft", "lora_r", "lora_alpha", "lora_target_modules", "optim", "learning_rate"),
    *("lr_scheduler_type", "seed", "num_train_epochs", "max_steps", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "num_generations"),
)


class KeepRecipeCallback(TrainerCallback):
    """Writes the keys of a recipe into the folder of its run with each checkpoint."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the file on the main process."""
        if state.is_world_process_zero:
            text = json.dumps(self._values, indent=2) + "\n"
            (Path(str(args.output_dir)) / FILE).write_text(text, encoding="utf-8")


def values_of(recipe: Recipe) -> dict[str, Any]:
    """The keys of `recipe` with which another run would be trained, as JSON holds them."""
    owners = (recipe.recipe, recipe.data, recipe.model, recipe.training, recipe.more)
    values = {}
    for key in _KEPT:
        owner = next((owner for owner in owners if hasattr(owner, key)), None)
        if owner is not None:
            values[key] = getattr(owner, key)
    return json.loads(json.dumps(values, default=lambda value: str(getattr(value, "value", value))))


def check_continues(recipe: Recipe, checkpoint: str) -> None:
    """Says what `recipe` changes of the run that has saved `checkpoint`.

    Raises:
        RecipeError: if another trainer has saved it.
    """
    file = Path(checkpoint).parent / FILE
    if not file.is_file():
        return
    before, now = json.loads(file.read_text(encoding="utf-8")), values_of(recipe)
    theirs = before.get("trainer")
    if theirs != now["trainer"]:
        raise RecipeError(
            f"{recipe.source}: `trainer` is {now['trainer']!r}, but {checkpoint} is of `trainer: {theirs}`; start from "
            "its model (`model_name_or_path`) with another `output_dir`."
        )
    changed = [f"`{key}` {before.get(key)!r} → {value!r}" for key, value in now.items() if before.get(key) != value]
    if changed and PartialState().is_main_process:
        logger.warning("The run in %s goes on with other values: %s.", file.parent, ", ".join(changed))
