"""``liger-trainer new``: writes a commented recipe for a model, data, a goal and a card."""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.errors import UserError
from liger_trainer.tools.cli.argument_types import memory_size
from liger_trainer.tools.cli.run_recipe import prepare_libraries

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

GOALS = {
    "sft": "learn to answer as in the data",
    "dpo": "prefer one answer to another, from pairs",
    "kto": "prefer good answers, from single answers with a label",
    "grpo": "find good answers by trying, from prompts and rewards",
}
_SOURCE = Path("the new recipe")
_LAUNCH = 'if __import__("liger_trainer.cli").cli.run_yaml(globals()): pass  # lets `accelerate launch` run this file'
_LORA: dict[str, Any] = {
    **{"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "lora_target_modules": "all-linear"},
    **{"bf16": True, "optim": "adamw_torch_fused"},
}
_METHODS: dict[str, dict[str, Any]] = {  # the best first
    "full": {"bf16": False, "optim": "liger_adamw"},
    "LoRA": _LORA,
    "QLoRA": {"load_in_4bit": True, **_LORA},
}
_IN_FP16: dict[str, dict[str, Any]] = {  # a gradient scaler needs trained weights in fp32
    "full": {"dtype": "float32", "optim": "adamw_torch_fused"},
    **{name: {**_METHODS[name], "dtype": "float16"} for name in ("LoRA", "QLoRA")},
}
_WITHOUT_BF16 = {
    "bf16": False,
    "fp16": True,
    "attn_implementation": "sdpa",
    "liger_kernel_config": {"attention": False},
}
_LANGUAGE_MODEL = r".*language_model.*(_proj|in_proj_\w+)"  # without the towers of images and audio
_RATES = {"sft": (1e-5, 2e-4), "dpo": (1e-6, 5e-6), "kto": (1e-6, 5e-6), "grpo": (1e-6, 1e-5)}  # full, adapters
_SEQUENCES = {"sft": 16, "dpo": 16, "kto": 16, "grpo": 64}  # of an optimizer step
_COMMENTS = {
    "dtype": "of the weights",
    "liger_kernel_config": "attention is torch's: ours is for newer GPUs",
    "attn_implementation": "the kernels of liger_trainer, or what is installed",
    "load_in_4bit": "the frozen weights in 4 bits (QLoRA); needs bitsandbytes",
    "lora_r": "the rank of the adapters: more learns more, and takes more memory",
    "lora_dropout": "with dropout, prompts are not shared between their answers",
    "max_length": "tokens; longer rows are cut",
    "packing": "short rows fill one row together, and do not see each other",
    "assistant_only_loss": "only the assistant's turns are learnt",
    "beta": "how close the model stays to where it starts",
    "reward_funcs": "functions of yours too, as package.module:function",
    "num_generations": "answers to each prompt",
    "gradient_checkpointing": "less memory, some of which `activation_memory` spends again",
    "activation_memory": "checkpointed layers keep what the GPU has room for",
    "fp16": "autocast with a gradient scaler, for cards without bf16",
    "bf16": "autocast; off where all weights are trained in bf16",
    "optim": "liger_adamw trains bf16 weights as fp32 ones",
    "save_total_limit": "older checkpoints are deleted",
}


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "new",
        help="write a recipe: for a model, data, a goal and a card",
        description="Asks for model, data, goal and memory where they are not given, takes the best way to train that "
        "fits (`liger-trainer plan`), and writes a commented recipe. Nothing is trained, and no file is overwritten.",
    )
    parser.add_argument(
        "file", metavar="FILE", nargs="?", default="recipe.yaml", help="the recipe to write (recipe.yaml)"
    )
    parser.add_argument("--model", metavar="MODEL", help="a Hub id or a model folder")
    parser.add_argument("--data", metavar="DATA", nargs="+", help="files, patterns or folders, or a dataset on the Hub")
    parser.add_argument("--goal", choices=GOALS, help="; ".join(f"{name}: {what}" for name, what in GOALS.items()))
    parser.add_argument("--gpu_memory", metavar="SIZE", help="memory of the GPU, such as 24GB")
    parser.add_argument(
        "--fp16", action="store_true", help="for a GPU without bf16, such as a T4; taken where there is one here"
    )
    parser.set_defaults(function=new)


def new(arguments: Namespace, _: Sequence[str]) -> int:
    """Writes the recipe; returns the exit code."""
    path = Path(arguments.file)
    if path.exists():
        raise UserError(f"FILE is {arguments.file!r}, which is there already; give another name.")
    if not path.parent.is_dir():
        raise UserError(f"FILE is {arguments.file!r}, but there is no folder {str(path.parent)!r}; make it first.")
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"FILE is {arguments.file!r}; its name must end in .yaml.")
    model = arguments.model or _asked("model", "Model (a Hub id or a folder)", "Qwen/Qwen3-0.6B")
    data = arguments.data or _asked("data", "Data (files, or a dataset on the Hub)", "trl-lib/Capybara").split()
    goals = ", ".join(f"{name} ({what})" for name, what in GOALS.items())
    goal = (arguments.goal or _asked("goal", f"Goal: {goals}", "sft")).lower()
    if goal not in GOALS:
        raise UserError(f"`--goal` is {goal!r}; it must be one of {', '.join(GOALS)}.")
    try:
        size = memory_size(arguments.gpu_memory or _asked("gpu_memory", "Memory of the GPU", "24GB"))
    except ArgumentTypeError as error:
        raise UserError(f"`--gpu_memory`: {error}.") from error
    prepare_libraries()
    from liger_trainer.configs.flags import emulates_bf16

    values = {**_of_data(goal, model, data), "output_dir": f"outputs/{path.stem}"}
    methods = _methods(values, arguments.fp16 or emulates_bf16())
    method, values, memory = _fitting(goal, values, methods, size)
    path.write_text(_written(values, f"{model}, {method}, {GOALS[goal]}. {memory}"), encoding="utf-8")
    print(f"{path}: {method}. {memory}\n")
    for command, what in (
        (f"liger-trainer data {path}", "the rows as the model will see them"),
        (f"liger-trainer doctor {path}", "traps that no error shows"),
        (f"liger-trainer train {path} --smoke", "offline, with a tiny model"),
        (f"liger-trainer train {path}", "the real thing"),
    ):
        print(f"  {command:<48} {what}")
    return 0


def _asked(option: str, question: str, default: str) -> str:
    """The answer of the user at the terminal."""
    if not sys.stdin.isatty():
        raise UserError(f"`--{option}` is missing, and there is no terminal to ask at; give it, such as {default!r}.")
    try:
        return input(f"{question} [{default}]: ").strip().strip("'\"") or default
    except EOFError as error:
        raise UserError(f"`--{option}` is missing, and the input has ended; give it.") from error


def _of_data(goal: str, model: str, data: Sequence[str]) -> dict[str, Any]:
    """The keys that model, data and goal decide."""
    from liger_trainer.data.files import suffix
    from liger_trainer.recipe.model import config_of_values, positions_of

    values: dict[str, Any] = {"trainer": goal, "model_name_or_path": model}
    values |= {"dtype": "bfloat16", "attn_implementation": "auto"}
    local = any(Path(name).exists() or any(sign in name for sign in "*?[") for name in data)
    if not local and (len(data) > 1 or suffix(data[0])):
        raise UserError(f"`--data` is {' '.join(data)}, which is not here; give files, or one dataset on the Hub.")
    values |= {"data_files": list(data)} if local else {"dataset_name": data[0], **_shipped(goal, data[0])}
    # Those of the Hub are taken for conversations, unless a shipped recipe says otherwise.
    columns = _columns(values) if local else [*values.get("columns", ["messages"])]
    config = config_of_values(values, _SOURCE, packaged=True)
    positions = positions_of(config) or 4096  # more have no embedding, or were not learnt
    pictures = bool({"image", "images"} & {*columns})
    if pictures and config.get_text_config() is config:
        raise UserError(f"`--data` has images, but `--model` {model!r} reads text alone; give a model that sees them.")
    if goal == "grpo":
        values |= _right_answers(columns) if local else {}
        return values | {
            "reward_funcs": ["liger_trainer.rewards:accuracy"],
            **{"num_generations": 8, "max_completion_length": min(1024, positions // 2), "beta": 0.0},
        }
    values["max_length"] = min(4096 if goal == "sft" else 2048, positions)
    if goal != "sft":
        return values | {"beta": 0.1}
    values |= {"assistant_only_loss": True} if "messages" in columns else {}
    return values if pictures or not _may_pack(values, config) else {**values, "packing": True}


def _shipped(goal: str, dataset: str) -> dict[str, Any]:
    """What the shipped recipes say of a dataset on the Hub: its configuration, and how it is read for this goal."""
    from liger_trainer.recipe.file import read_recipe, shipped_recipes

    found: dict[str, Any] = {}
    for recipe in map(read_recipe, shipped_recipes().values()):
        if recipe.get("dataset_name") == dataset:
            keys = ("dataset_config", *(("columns", "system_prompt") if recipe["trainer"] == goal else ()))
            found |= {key: recipe[key] for key in keys if key in recipe}
    return found


def _right_answers(columns: Sequence[str]) -> dict[str, Any]:
    """The key that gives the reward `accuracy` its column.

    Raises:
        UserError: if the data has no column of answers.
    """
    from liger_trainer.data.shapes import NAMES

    found = next((name for name in ("solution", *NAMES["answer"]) if name in columns), None)
    if found is None:
        raise UserError(
            f"`--data` has the columns {', '.join(columns)}; `--goal grpo` rewards answers that equal those in a "
            "column such as `solution`. Add it, or begin with `liger-trainer recipes qwen3_0_6b_grpo_lora` and a "
            "reward function of yours."
        )
    return {} if found in ("solution", "answer") else {"columns": {"solution": found}}


def _may_pack(values: dict[str, Any], config: PreTrainedConfig) -> bool:
    """Whether packed rows do not see each other, as far as `doctor` can tell."""
    from liger_trainer.recipe.load import check_values
    from liger_trainer.tools.diagnosis.hybrids import leaks
    from liger_trainer.tools.diagnosis.sample import CannotCheckError, Case

    checked, _ = check_values({**values, "packing": True}, [], _SOURCE)
    try:
        return not leaks(Case(_SOURCE, checked, config, is_model=False))
    except CannotCheckError:
        return False


def _methods(values: dict[str, Any], fp16: bool) -> dict[str, dict[str, Any]]:
    """What to try, the best first."""
    from liger_trainer.recipe.model import config_of_values, published_form

    config = config_of_values(values, _SOURCE, packaged=True)
    methods = _METHODS
    if fp16:
        values.pop("packing", None)  # torch's attention would take a mask of all pairs of tokens
        methods = {name: {**settings, **_WITHOUT_BF16} for name, settings in _IN_FP16.items()}
    if published_form(config) is not None:
        methods = {name: settings for name, settings in methods.items() if not settings.get("load_in_4bit")}
    if config.get_text_config() is config:
        return methods
    text = {"lora_target_modules": [_LANGUAGE_MODEL]}
    return {name: {**settings, **(text if "use_peft" in settings else {})} for name, settings in methods.items()}


def _columns(values: dict[str, Any]) -> list[str]:
    """The columns of local rows as the trainer takes them.

    Raises:
        RecipeError: for data that does not suit the goal.
    """
    from liger_trainer.recipe.file import RecipeError
    from liger_trainer.recipe.load import check_values
    from liger_trainer.tools.diagnosis.sample import converted_rows

    rewards = {"reward_funcs": ["liger_trainer.rewards:length"]} if values["trainer"] == "grpo" else {}
    checked, _ = check_values({**values, **rewards}, [], _SOURCE)
    try:  # the tokenizer says whether questions become turns of a conversation
        rows = converted_rows(checked, _SOURCE)
    except RecipeError:  # it may not be here, and the columns do not depend on it; other errors come again
        rows = converted_rows({**checked, "model_name_or_path": ""}, _SOURCE)
    return list(rows.column_names)


def _fitting(
    goal: str, values: dict[str, Any], methods: dict[str, dict[str, Any]], size: int
) -> tuple[str, dict[str, Any], str]:
    """The best method with the largest batch that fits: its name, all keys, and its memory in words.

    Raises:
        UserError: if nothing fits.
    """
    from liger_trainer.plan.estimate import estimate
    from liger_trainer.tools.planning.cards import DEFAULT_CARD, cluster_of
    from liger_trainer.tools.planning.inputs import read_inputs
    from liger_trainer.tools.planning.report import GIB, make_plan

    least = 0.0
    for method, settings in methods.items():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "recipe.yaml"
            file.write_text(_written({**values, **settings, **_schedule(goal, method, 1)}, "tried"), encoding="utf-8")
            inputs = read_inputs(str(file), [])  # which builds the model; another batch needs no other
        for batch in (8, 4, 2, 1):
            found = _schedule(goal, method, batch)
            tried = dataclasses.replace(inputs, values={**inputs.values, **found})
            plan = make_plan(tried, cluster_of(DEFAULT_CARD, 1), size)
            least = estimate(tried.run, plan.written.setting).total / GIB
            if plan.written.fits:
                memory = f"One GPU of {size / GIB:.0f} GiB, of which it takes {least:.0f} GiB."
                return method, {**values, **settings, **found}, memory
    raise UserError(
        f"`--gpu_memory` is {size / GIB:.0f} GiB, and the least that fits takes {least:.0f} GiB; give a smaller model, "
        "or see `liger-trainer plan` for several GPUs."
    )


def _schedule(goal: str, method: str, batch: int) -> dict[str, Any]:
    full, adapters = _RATES[goal]
    return {
        "num_train_epochs": 1,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": _SEQUENCES[goal] // batch,
        **{"gradient_checkpointing": True, "activation_memory": "auto"},
        "learning_rate": full if method == "full" else adapters,
        **{"lr_scheduler_type": "cosine", "warmup_steps": 0.03, "logging_steps": 1 if goal == "grpo" else 10},
        **{"save_strategy": "steps", "save_steps": 100, "save_total_limit": 2, "report_to": "none"},
    }


def _written(values: dict[str, Any], title: str) -> str:
    """A recipe: YAML that is valid Python too, with a comment where a key needs one."""
    lines = [f"# {title}", _LAUNCH, ""]
    for key, value in values.items():
        comment = f"  # {_COMMENTS[key]}" if key in _COMMENTS else ""
        lines.append(f"{key}: {json.dumps(value)}{comment}")
    return "\n".join(lines) + "\n"
