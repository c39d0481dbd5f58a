"""What is compared: a recipe, or a model to fine-tune, with the keys that every run of it gets.

The stock run has a recipe of its own: TRL's trainer and configuration, with the arguments that they have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from liger_trainer.configs.liger_adamw import LIGER_ADAMW
from liger_trainer.recipe.file import RecipeError, find_recipe, first_line, read_recipe, shipped_recipes
from liger_trainer.recipe.load import Recipe, build_recipe, check_values
from liger_trainer.recipe.schema import TrainerKind
from liger_trainer.recipe.smoke import shrink

WARM_START = "warm_start"
"""The folder of the warm start's model, in `Request.work`."""

_OF_A_MODEL: dict[str, Any] = {
    "trainer": "sft",
    "dtype": "float32",
    "dataset_name": "pydoc_topics",
    "max_length": 512,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-5,
}
"""The recipe of a model that is given by itself: its text ships with Python."""

_ALIKE: dict[str, Any] = {
    "logging_steps": 1,
    "logging_strategy": "steps",
    "eval_strategy": "no",
    "eval_on_start": False,
    "save_strategy": "no",
    "load_best_model_at_end": False,
    "report_to": "none",
    "push_to_hub": False,
    "accelerate_config": None,
    "overwrite_output_dir": False,
    "router_balance": False,
    "test_split_size": None,
    "disable_tqdm": True,
}
"""Keys of every run: each step is logged, and nothing is evaluated or saved."""

_REFUSED = {
    "use_vllm": "its completions cannot be given to the other runs; set it to false",
    "use_transformers_continuous_batching": "its completions cannot be given to the other runs; set it to false",
    "router_z_loss_coef": "the stock trainer has no such term in its loss; set it to 0",
    "fsdp": "the runs are of one process on one device; leave it out",
    "deepspeed": "the runs are of one process on one device; leave it out",
    "resume_from_checkpoint": "the runs start at the first step; leave it out",
}


@dataclasses.dataclass(frozen=True)
class Request:
    """What to compare."""

    recipe: str  # a recipe's file or name, or a model's folder or name on the Hub
    options: tuple[str, ...]  # command-line options, which win over the recipe
    steps: int  # optimizer steps of each run
    smoke: bool  # whether to shrink the recipe, as ``train --smoke`` does
    folder: Path  # where results go

    @property
    def work(self) -> Path:
        """The folder of files that the runs leave for each other; it is deleted at the end."""
        return self.folder / "work"

    def write(self) -> None:
        """Writes the request into `work`, for the processes of the runs."""
        fields = {**dataclasses.asdict(self), "folder": str(self.folder)}
        (self.work / "request.json").write_text(json.dumps(fields), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Request:
        """Reads what [`write`] has written."""
        fields = json.loads((folder / "work" / "request.json").read_text(encoding="utf-8"))
        return cls(**{**fields, "options": tuple(fields["options"]), "folder": folder})


def values_of(request: Request) -> tuple[dict[str, Any], Path, list[str]]:
    """The keys of every run, with their values, the recipe's file, and what was changed, as sentences."""
    source, written = read_source(request)
    _check_options(request)
    checked, given = check_values(written, request.options, source)
    _check_comparable(checked, source)
    if request.smoke:
        checked = shrink(checked, given | {"output_dir"})
    alike = {**_ALIKE, "max_steps": request.steps}
    values = {**checked, **{key: value for key, value in alike.items() if key in checked}}
    notes = []
    if values["optim"] == LIGER_ADAMW:
        values |= {"optim": "adamw_torch_fused", "optim_args": None}
        notes.append("`optim` is adamw_torch_fused in every run: liger_adamw has no stock counterpart.")
    if values["lora_dropout"]:
        values["lora_dropout"] = 0.0
    notes.append("Dropout is off in every run: the runs would drop different numbers.")
    if values["warm_start"] is not None:
        model = {"model_name_or_path": str(request.work / WARM_START), "model_revision": "main"}
        values |= {**model, "warm_start": None, "model_config": None}
        values |= {"tokenizer_name_or_path": None, "tokenizer_vocab_size": None}
        notes.append("The warm start ran once, with our trainer; every run starts from its model.")
    if checked["accelerate_config"] is not None:
        notes.append(f"One process on one device: `accelerate_config: {checked['accelerate_config']}` is left out.")
    return values, source, notes


def read_source(request: Request) -> tuple[Path, dict[str, Any]]:
    """The recipe's file with its keys, or the keys with which a model is fine-tuned."""
    name = request.recipe
    if Path(name).is_file() or Path(name).name.removesuffix(".yaml") in shipped_recipes():
        path = find_recipe(name)
        return path, read_recipe(path)
    if not (Path(name) / "config.json").is_file() and (name.endswith((".yaml", ".yml")) or name.count("/") != 1):
        try:
            find_recipe(name)
        except RecipeError as error:
            raise RecipeError(f"{error} A model is given by its folder, or as owner/name on the Hub.") from error
    values = {**_OF_A_MODEL, "model_name_or_path": name}
    if any(option.split("=")[0] in ("--data_files", "--datasets") for option in request.options):
        del values["dataset_name"]
    return Path(name), values


def _check_options(request: Request) -> None:
    """Refuses options that ``--steps`` and the single process leave no room for."""
    names = {option.split("=")[0] for option in request.options}
    if "--max_steps" in names:
        raise RecipeError("`--max_steps` is given; `compare` runs the same few steps of every side: use `--steps`.")
    for name in ("--accelerate_config", "--num_processes"):
        if name in names:
            raise RecipeError(f"`{name}` is given, but `compare` runs one process on one device; leave it out.")


def _check_comparable(values: Mapping[str, Any], source: Path) -> None:
    for key, reason in _REFUSED.items():
        if values.get(key):
            raise RecipeError(f"{source}: `{key}` is {values[key]!r}, which cannot be compared: {reason}.")
    if values["expert_parallel_size"] > 1:
        raise RecipeError(
            f"{source}: `expert_parallel_size` is {values['expert_parallel_size']}, but `compare` runs one process on "
            "one device; set it to 1."
        )


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
