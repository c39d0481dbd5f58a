"""Reads a recipe: one flat YAML file, and command-line options of the same names, which win over it.

The keys are declared in `schema`. Each value is checked against the type of its field here, and against its range and
the other keys in `checks`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import typing
from argparse import Action, ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from liger_trainer.recipe.checks import check_agreement, check_ranges, generation_advice, target_modules, unknown_keys
from liger_trainer.recipe.file import RecipeError, find_recipe, read_recipe
from liger_trainer.recipe.keys import OUTPUT_DIR, alternatives, spelling, type_name
from liger_trainer.recipe.schema import TRAINERS, TrainerKind, argument_classes
from liger_trainer.recipe.smoke import shrink

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, TrlParser

    from liger_trainer.recipe.schema import CausalLMArguments, RecipeArguments, RewardArguments

_SHARED_WITH_WARM_START = (
    *("model_name_or_path", "model_config", "model_family", "model_revision", "trust_remote_code"),
    *("tokenizer_name_or_path", "tokenizer_vocab_size", "attn_implementation"),
    *("dtype", "bf16", "fp16", "tf32", "use_cpu", "seed", "report_to", "use_liger_kernel", "liger_kernel_config"),
)


@dataclasses.dataclass
class Recipe:
    """A recipe that has been read and checked."""

    source: Path  # the file it came from
    recipe: RecipeArguments  # the keys of our own: trainer, model and data
    data: ScriptArguments  # TRL's choice of one dataset
    mixture: DatasetMixtureConfig  # TRL's mixture of datasets
    model: ModelConfig  # TRL's model and LoRA arguments
    training: TrainingArguments  # the trainer's arguments
    more: CausalLMArguments | RewardArguments | None = None  # further keys of this trainer, or None
    warm_start: Recipe | None = None  # the supervised recipe that runs first

    @property
    def kind(self) -> TrainerKind:
        """What its ``trainer`` stands for."""
        return TRAINERS[self.recipe.trainer]

    def get(self, name: str) -> Any:
        """A key that is declared in `more` for some trainers and in `training` for others; None if in neither."""
        return getattr(self.more, name, getattr(self.training, name, None))


def load_recipe(name: str | Path, overrides: Sequence[str] = (), smoke: bool = False) -> Recipe:
    """Reads and checks a recipe: a YAML file, or a shipped recipe by its name.

    Args:
        name: Its path or name.
        overrides: Command-line options, which win over the file.
        smoke: Whether to shrink it to a few steps of a tiny random model of the same family on generated data, offline.
    """
    source = find_recipe(name)
    values, given = check_values(read_recipe(source), overrides, source)
    if smoke:
        values = shrink(values, given)
    recipe = build_recipe(values, source)
    if recipe.recipe.warm_start is not None:
        recipe.warm_start = _build_warm_start(recipe.recipe.warm_start, values, source, smoke)
    return recipe


def check_values(values: Mapping[str, Any], overrides: Sequence[str], source: Path) -> tuple[dict[str, Any], set[str]]:
    """Checks every key and value of a recipe against its field; `overrides`, such as ``["--max_steps", "10"]``, win.

    Returns:
        All fields with their values, and the names that `overrides` set.
    """
    trainer = _trainer_of(values, overrides, source)
    classes = argument_classes(trainer)
    parser, actions = _parser(classes)
    hints = {name: hint for cls in classes for name, hint in typing.get_type_hints(cls).items()}
    converted = {}
    unknown = [key for key in values if key not in actions]
    if unknown:
        raise unknown_keys(unknown, list(actions), str(source), trainer)
    for key, value in values.items():
        try:
            converted[key] = _convert(value, hints[key], actions[key])
        except ValueError as error:
            raise RecipeError(f"{source}: `{key}` is {value!r}; it must be {error}.") from error
    parser.set_defaults_with_config(**{"output_dir": OUTPUT_DIR.format(source.stem), **converted})

    unset, others = _split_unset(overrides, hints)
    parser.set_defaults(**dict.fromkeys(unset))
    # argparse prints its usage to stderr before it calls error(); the message alone is enough.
    with contextlib.redirect_stderr(io.StringIO()):
        namespace, rest = parser.parse_known_args(others)
    if rest:
        if rest[0].startswith("-"):
            keys = [word.lstrip("-").split("=")[0].replace("-", "_") for word in rest if word.startswith("--")]
            raise unknown_keys(keys or rest[:1], list(actions), "On the command line", trainer)
        raise RecipeError(f"On the command line: {rest[0]!r} follows no option; options are `--key value`.")
    written = {option.split("=")[0].lstrip("-").replace("-", "_") for option in overrides if option.startswith("--")}
    given = {name for name in actions if name in written or f"no_{name}" in written}
    checked = {name: _listed(value) for name, value in vars(namespace).items()}
    check_ranges(checked, source)
    check_agreement(checked, source)
    return checked, given


def build_recipe(values: Mapping[str, Any], source: Path) -> Recipe:
    """Builds a recipe's dataclasses from all its checked values."""
    values = _fit_to_device(values, source)
    if values["eval_strategy"] == "no":
        values["eval_on_start"] = False  # without evaluation, there is none at the start either
    built: list[Any] = []
    for cls in argument_classes(values["trainer"]):
        chosen = {field.name: values[field.name] for field in dataclasses.fields(cls) if field.init}
        try:
            built.append(cls(**chosen))
        except (ValueError, TypeError, ImportError) as error:
            reason = " ".join(str(error).split())  # one line
            raise RecipeError(f"{source}: {reason}{generation_advice(error, values)}") from error
    recipe = Recipe(source, *built)
    if not (recipe.training.bf16 or recipe.training.fp16) and recipe.training.mixed_precision in ("bf16", "fp16"):
        recipe.training.mixed_precision = "no"  # which a launcher's configuration had set: the recipe decides
    recipe.model.lora_target_modules = target_modules(recipe.model.lora_target_modules)
    return recipe


def _trainer_of(values: Mapping[str, Any], overrides: Sequence[str], source: Path) -> str:
    """The value of ``trainer``, which decides what the other keys are."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--trainer", nargs="?", default=values.get("trainer", "sft"))
    trainer = parser.parse_known_args(list(overrides))[0].trainer
    if trainer not in tuple(TRAINERS):  # a list, for example, cannot be looked up in a dict
        raise RecipeError(f"{source}: `trainer` is {trainer!r}; it must be one of {', '.join(map(repr, TRAINERS))}.")
    return trainer


def _parser(classes: Sequence[Any]) -> tuple[TrlParser, dict[str, Action]]:
    """A command-line parser for the fields of `classes`, and the argument of each field."""
    from trl import TrlParser

    actions: dict[str, Action] = {}

    class Parser(TrlParser):
        def add_argument(self, *flags: Any, **settings: Any) -> Action:
            action = super().add_argument(*flags, **settings)
            if action.nargs == "?" and action.const is True and action.type is str:
                action.type = _switch
            if any(isinstance(choice, bool) for choice in action.choices or ()):
                action.choices, action.type = [*dict.fromkeys(map(spelling, action.choices or ()))], str.lower
            actions.setdefault(action.dest, action)  # `--no_x` has the same name and comes after `--x`
            return action

        def error(self, message: str) -> typing.NoReturn:
            raise RecipeError(f"On the command line: {message.rstrip('.')}.")

    return Parser(tuple(classes), allow_abbrev=False, add_help=False), actions


def _split_unset(overrides: Sequence[str], hints: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The fields that `overrides` set to null, as a recipe may, and the other overrides."""
    words = [part for word in overrides for part in (word.split("=") if word.partition("=")[2] == "null" else [word])]
    unset: list[str] = []
    others: list[str] = []
    for word in words:
        option = others[-1] if others and others[-1].startswith("--") else ""
        name = option.lstrip("-").replace("-", "_")
        if word == "null" and type(None) in alternatives(hints.get(name)):
            unset.append(name)
            others.pop()
        else:
            others.append(word)
    return unset, others


def _listed(value: Any) -> Any:
    """The items of a list that was given as one JSON text on the command line; any other value as it is."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str) and value[0].lstrip().startswith("["):
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(value[0])
    return value


def _switch(text: str) -> bool | str:
    """The value of a text option that is true if no value follows, such as transformers' `fsdp`."""
    return {"true": True, "false": False}.get(text.lower(), text)


def _convert(value: Any, hint: Any, action: Action) -> Any:
    """`value` as its field needs it; text is read as on the command line."""
    if action.nargs == "+" and value is not None and not isinstance(value, (list, dict)):
        value = [value]
    unset = value is None and type(None) in alternatives(hint)
    if action.choices is not None and spelling(value) not in action.choices and not unset:
        raise ValueError("one of " + ", ".join(repr(choice) for choice in action.choices))
    if _fits(value, hint) or (action.type is _switch and isinstance(value, (bool, list))):
        return value
    if str in alternatives(hint) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and callable(action.type):
        with contextlib.suppress(Exception):
            return action.type(value)
    raise ValueError(type_name(hint))


def _fits(value: Any, hint: Any) -> bool:
    """Whether a YAML value already has the type of its field."""
    for option in alternatives(hint):
        origin = typing.get_origin(option) or option
        if option is Any or (option is type(None) and value is None):
            return True
        if origin is Literal and value in typing.get_args(option):
            return True
        if not isinstance(origin, type):
            continue
        if dataclasses.is_dataclass(origin) and isinstance(value, dict):
            return True
        if origin is float and isinstance(value, int) and not isinstance(value, bool):
            return True
        if isinstance(value, bool) and origin is not bool:
            continue
        if isinstance(value, origin):
            inner = typing.get_args(option)
            return not (isinstance(value, list) and inner) or all(_fits(item, inner[0]) for item in value)
    return False


def _fit_to_device(values: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """Checked values with the defaults for a machine without an accelerator: no pinned memory, and `use_cpu`.

    Without `use_cpu`, the processes of a launch that find no accelerator would not join a process group, and each would
    train the whole recipe on its own.
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
    asked = {f"`{name}` is true": f"--{name} false " for name in ("bf16", "fp16") if values[name]}
    asked |= {f"`dtype` is {name!r}": "" for name in ("bfloat16", "float16") if values["dtype"] == name}
    if asked and not values["use_cpu"]:
        what, option = next(iter(asked.items()))
        raise RecipeError(
            f"{source}: {what}, but there is no GPU here (`liger-trainer doctor` says why); add `{option}--dtype "
            "float32` to train on the CPU, or `--smoke` to try the recipe."
        )
    return {**values, "use_cpu": True}


def _build_warm_start(own: Mapping[str, Any], values: Mapping[str, Any], source: Path, smoke: bool) -> Recipe:
    shared = sorted(set(own) & {*_SHARED_WITH_WARM_START, "trainer", "output_dir", "warm_start"})
    if shared:
        raise RecipeError(f"{source}: `warm_start` sets `{shared[0]}`, which it takes from the recipe; leave it out.")
    source = Path(f"{source}: warm_start")
    folder = str(Path(str(values["output_dir"])) / "warm_start")
    optimizer = () if "optim" in own else ("optim", "optim_args")
    inherited = {key: values[key] for key in (*_SHARED_WITH_WARM_START, *optimizer) if values.get(key) is not None}
    checked, given = check_values({**inherited, "output_dir": folder, "trainer": "sft", **own}, [], source)
    if smoke:
        checked = shrink(checked, given | {"output_dir"})
    return build_recipe(checked, source)
