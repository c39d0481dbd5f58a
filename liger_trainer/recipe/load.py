"""Recipes: one flat YAML file says what to train, on what, and how.

A recipe's keys are the fields of `RecipeArguments`, TRL's `ScriptArguments`, `DatasetMixtureConfig` and `ModelConfig`,
the trainer's own arguments (such as `LigerDPOConfig`), and for some trainers a few more (`recipe_trainers.TRAINERS`).
Command-line options have the same names and win over the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe.checks import generation_advice, target_modules
from liger_trainer.recipe.file import RecipeError, find_recipe, read_recipe
from liger_trainer.recipe.trainers import TRAINERS, TrainerKind, argument_classes
from liger_trainer.recipe.values import check_values

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

    from liger_trainer.configs.recipe_arguments import CausalLMArguments, RecipeArguments, RewardArguments

_SHARED_WITH_WARM_START = (
    *("model_name_or_path", "model_config", "model_family", "model_revision", "trust_remote_code"),
    *("tokenizer_name_or_path", "tokenizer_vocab_size", "attn_implementation"),
    *("dtype", "bf16", "fp16", "tf32", "use_cpu", "seed", "report_to", "use_liger_kernel", "liger_kernel_config"),
)


@dataclasses.dataclass
class Recipe:
    """A recipe, read and checked.

    Args:
        source: The file it came from.
        recipe: Trainer, model and data choices that are ours.
        data: TRL's choice of one dataset.
        mixture: TRL's mixture of datasets.
        model: TRL's model and LoRA arguments.
        training: The trainer's arguments.
        more: Further arguments of this trainer: `CausalLMArguments`, `RewardArguments` or None.
        warm_start: The supervised recipe that runs first.
    """

    source: Path
    recipe: RecipeArguments
    data: ScriptArguments
    mixture: DatasetMixtureConfig
    model: ModelConfig
    training: TrainingArguments
    more: CausalLMArguments | RewardArguments | None = None
    warm_start: Recipe | None = None

    @property
    def kind(self) -> TrainerKind:
        """What its ``trainer`` stands for."""
        return TRAINERS[self.recipe.trainer]

    def get(self, name: str) -> Any:
        """An argument that some trainers have among their own and some in `more`; None for one that has it nowhere."""
        return getattr(self.more, name, getattr(self.training, name, None))


def fit_to_device(values: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Checked values with the defaults that a machine without an accelerator needs: no pinned memory.

    There `use_cpu` is true: without it, processes of one launch that find no accelerator would not join a group, and
    each of them would train the whole recipe on its own.

    Raises:
        RecipeError: if the recipe itself asks for bf16, fp16 or offloading where there is no accelerator.
    """
    import torch

    values = dict(values)
    if torch.accelerator.is_available() and not values["use_cpu"]:
        return values
    values["dataloader_pin_memory"] = False
    if values.get("activation_offloading"):
        raise RecipeError(
            f"{source}: `activation_offloading` is true, but there is no accelerator to offload from; set it to false."
        )
    asked = [name for name in ("bf16", "fp16") if values[name]]
    if asked and not values["use_cpu"]:
        raise RecipeError(
            f"{source}: `{asked[0]}` is true, but there is no GPU here (`liger-trainer doctor` says why); add "
            f"`--{asked[0]} false --dtype float32` to train on the CPU, or `--smoke` to try the recipe."
        )
    return {**values, "use_cpu": True}


def build_recipe(values: Mapping[str, Any], source: Path) -> Recipe:
    """The dataclasses of a recipe from all its checked values.

    Raises:
        RecipeError: where the dataclasses refuse a value or a combination.
    """
    values = fit_to_device(values, source)
    if values["eval_strategy"] == "no":
        values["eval_on_start"] = False  # a command line that switches evaluation off means the file's first one too
    built = []
    for cls in argument_classes(values["trainer"]):
        chosen = {field.name: values[field.name] for field in dataclasses.fields(cls) if field.init}
        try:
            built.append(cls(**chosen))
        except (ValueError, TypeError, ImportError) as error:
            reason = " ".join(str(error).split())  # one line
            raise RecipeError(f"{source}: {reason}{generation_advice(error, values)}") from error
    recipe = Recipe(source, *built)  # type: ignore[arg-type]
    recipe.model.lora_target_modules = target_modules(recipe.model.lora_target_modules)
    return recipe


def load_recipe(name: str | Path, overrides: Sequence[str] = (), smoke: bool = False) -> Recipe:
    """Reads and checks a recipe.

    Args:
        name: Path of a YAML file, or the bare name of a shipped recipe.
        overrides: Command-line options that win over the file.
        smoke: Shrink it to a few steps of a tiny random model of the same family on generated data, offline.

    Raises:
        RecipeError: for anything wrong with it; the message names the key, the file and what is allowed.
    """
    source = find_recipe(name)
    values, given = check_values(read_recipe(source), overrides, source)
    if smoke:
        from liger_trainer.recipe.smoke import shrink

        values = shrink(values, given)
    recipe = build_recipe(values, source)
    if recipe.recipe.warm_start is not None:
        recipe.warm_start = _build_warm_start(recipe.recipe.warm_start, values, source, smoke)
    return recipe


def _build_warm_start(own: Mapping[str, Any], values: Mapping[str, Any], source: Path, smoke: bool) -> Recipe:
    shared = sorted(set(own) & {*_SHARED_WITH_WARM_START, "trainer", "output_dir", "warm_start"})
    if shared:
        raise RecipeError(f"{source}: `warm_start` sets `{shared[0]}`, which is that of the recipe; leave it out.")
    source = Path(f"{source}: warm_start")
    folder = str(Path(str(values["output_dir"])) / "warm_start")
    inherited = {key: values[key] for key in _SHARED_WITH_WARM_START if values.get(key) is not None}
    checked, given = check_values({**inherited, "output_dir": folder, "trainer": "sft", **own}, [], source)
    if smoke:
        from liger_trainer.recipe.smoke import shrink

        checked = shrink(checked, given | {"output_dir"})
    return build_recipe(checked, source)
