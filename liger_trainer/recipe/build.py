"""The trainer of a recipe, built from its arguments, model, tokenizer and data, and checked before it trains."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import trl
import yaml
from accelerate import PartialState
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, ProgressCallback, Trainer, default_data_collator
from trl import get_peft_config

from liger_trainer.callbacks.log_lines import LogLinesCallback
from liger_trainer.callbacks.router_balance import NO_EXPERTS, RouterBalanceCallback, experts_of
from liger_trainer.data.turns import conversations, left_out, renderer
from liger_trainer.recipe.data import text_blocks
from liger_trainer.recipe.experts import adapted_in_4_bits, count_experts
from liger_trainer.recipe.file import RecipeError, accelerate_config, first_line
from liger_trainer.recipe.load import Recipe
from liger_trainer.recipe.model import config_of, load_model, lora_advice, model_kwargs, model_source
from liger_trainer.recipe.rewards import load_reward_functions
from liger_trainer.trainers.checks import packed_base

if TYPE_CHECKING:
    from peft import PeftConfig

logger = logging.getLogger(__name__)

_LOOKED_AT = 32
"""Rows whose text is compared with what they say, before training."""


def build_trainer(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any, evaluation: Any, resumed: bool
) -> Trainer:
    """Builds the trainer of `recipe`, ready to train, and checks it."""
    build = _build_causal_lm if recipe.recipe.trainer == "causal_lm" else _build_trl
    try:
        trainer = build(recipe, tokenizer, train, evaluation, resumed)
    except RecipeError:
        raise
    except UnpicklingError as error:
        raise RecipeError(
            f"{recipe.source}: the weights of {recipe.model.model_name_or_path!r} cannot be read: a weights file is "
            "damaged, or holds more than tensors. Copy it again, or save it as safetensors."
        ) from error
    except TemplateError as error:
        raise template_error(recipe, error) from error
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise RecipeError(f"{recipe.source}: {first_line(error)}{lora_advice(error, recipe)}") from error
    check_vocabulary(trainer, tokenizer)
    check_targets(recipe, trainer)
    check_prompts(recipe, trainer, train)
    _warn_of_what_is_left_out(recipe, trainer, train)
    check_adapted(recipe, trainer)
    check_optimizer(recipe, trainer)
    check_launch(recipe, trainer)
    _watch_routers(recipe, trainer)
    if trainer.pop_callback(ProgressCallback) is not None:
        trainer.add_callback(LogLinesCallback())
    return trainer


def _build_trl(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any, evaluation: Any, resumed: bool
) -> Trainer:
    args: Any = recipe.training
    model, peft_config = _model_and_adapters(recipe, tokenizer, resumed)
    if isinstance(model, str):
        # Without a device map, ORPO and CPO would spread the model over the devices.
        args.model_init_kwargs = {"device_map": None, **model_kwargs(recipe), **(args.model_init_kwargs or {})}
    if hasattr(args, "chat_template_path"):
        args.chat_template_path = chat_template(args.chat_template_path)
    functions = load_reward_functions(recipe.more)
    return recipe.kind.trainer_class(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=processing_class(recipe, tokenizer, train),
        peft_config=peft_config,
        **({"reward_funcs": functions} if functions else {}),
    )


def _build_causal_lm(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any, evaluation: Any, resumed: bool
) -> Trainer:
    """The trainer of ``trainer: "causal_lm"``: plain text in blocks, every token a target."""
    model, peft_config = _model_and_adapters(recipe, tokenizer, resumed)
    if isinstance(model, str):
        with packed_base.loading(recipe.training, model, peft_config):
            model = load_model(recipe, model)
    if peft_config is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config)
    return recipe.kind.trainer_class(
        model=model,
        args=recipe.training,
        train_dataset=text_blocks(train, tokenizer, recipe),
        eval_dataset=None if evaluation is None else text_blocks(evaluation, tokenizer, recipe),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )


def _model_and_adapters(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, resumed: bool
) -> tuple[Any, PeftConfig | None]:
    """The model, or where to load it from, and the configuration of the adapters that the trainer is to add.

    Raises:
        RecipeError: for 4-bit experts and a `chat_template_path`; TRL would train the tokens that it adds with its own
            adapters.
    """
    scored = recipe.kind.scores
    adapters = dataclasses.replace(recipe.model, lora_task_type="SEQ_CLS") if scored else recipe.model
    source, peft_config = model_source(recipe, tokenizer, resumed), get_peft_config(adapters)
    if peft_config is not None and recipe.model.model_name_or_path is not None:
        peft_config.revision = recipe.model.model_revision  # of the base; resuming and merging look there
    if not isinstance(source, str) or peft_config is None or not recipe.model.load_in_4bit:
        return source, peft_config
    if not count_experts(config_of(recipe, source)):
        return source, peft_config
    if (template := getattr(recipe.training, "chat_template_path", None)) is not None:
        raise RecipeError(
            f"{recipe.source}: `chat_template_path` is {template!r}, but tokens that it adds would not be trained with "
            "experts in 4 bits; leave it out for the tokenizer's own template."
        )
    options = getattr(recipe.training, "model_init_kwargs", None) or {}
    model = load_model(recipe, source, **{**options, "device_map": {"": "cpu"}})
    return adapted_in_4_bits(recipe, model, peft_config), None


def processing_class(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None if the model may need a whole processor, which TRL then loads."""
    ours = recipe.recipe.tokenizer_name_or_path or recipe.recipe.tokenizer_vocab_size
    pictures = {"image", "images"} & set(train.column_names or ())
    return tokenizer if ours or (recipe.recipe.trainer != "sft" and not pictures) else None


def chat_template(name: str | None) -> str | None:
    """``chat_template_path``, which may also be the name of a template that TRL ships."""
    if name is None or Path(name).exists():
        return name
    shipped = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if shipped.is_file():
        return str(shipped)
    if name.endswith((".jinja", ".j2")):
        raise RecipeError(f"`chat_template_path`: there is no file {name!r}.")
    return name


def check_vocabulary(trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer with more ids than the embedding has rows; on a GPU that fails in a device-side assert."""
    model: Any = trainer.model
    embedding = model.get_input_embeddings()
    rows = getattr(embedding, "base_layer", embedding).num_embeddings  # which adapters wrap
    if len(tokenizer) > rows:
        raise RecipeError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model's embedding has {rows} rows; use the model's "
            "own tokenizer, or set `vocab_size` in `model_config` to at least the number of tokens."
        )


def check_targets(recipe: Recipe, trainer: Trainer) -> None:
    """Refuses data whose rows all have at most one token: there is no next token to learn."""
    rows: Any = trainer.train_dataset
    if not hasattr(rows, "data") or "input_ids" not in rows.column_names:  # streamed, or tokenised later
        return
    longest = pc.max(pc.list_value_length(rows.data.column("input_ids"))).as_py()
    if longest is not None and longest < 2:
        raise RecipeError(
            f"{recipe.source}: no row has more than {longest} token, so there is nothing to learn; check the data."
        )


def check_prompts(recipe: Recipe, trainer: Trainer, train: Any) -> None:
    """Refuses prompts without tokens, and a chat template that fails on the first prompt; both would fail in a step."""
    row = next(iter(train)) if recipe.kind.data == "prompt" else {}
    prompt = row.get("prompt")
    processor: Any = trainer.processing_class
    empty = isinstance(prompt, str) and hasattr(train, "data") and "" in train.unique("prompt")
    if empty and not processor(text="")["input_ids"]:
        raise RecipeError("The column `prompt` holds empty text, which has no tokens; remove it.")
    if not isinstance(prompt, list) or {"image", "images"} & set(row):  # TRL adds the images to the turns
        return
    options = getattr(trainer.args, "chat_template_kwargs", None) or {}
    try:
        processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, ValueError) as error:
        raise template_error(recipe, error) from error


def _warn_of_what_is_left_out(recipe: Recipe, trainer: Trainer, train: Any) -> None:
    """Says once what the chat template leaves out of the first rows."""
    rows = [dict(row) for row in train.take(_LOOKED_AT)]
    if {"image", "images"} & set(rows[0]) or not any(map(conversations, rows)):
        return
    render = renderer(trainer.processing_class, getattr(trainer, "chat_template", None))
    try:
        missing = left_out(rows, render)
    except (TemplateError, ValueError, TypeError) as error:
        raise template_error(recipe, error) from error
    if missing and PartialState().is_main_process:
        logger.warning(
            "%s: the chat template leaves out %s of the first %d rows: none of it is trained on. `chat_template_path` "
            "takes another template.",
            *(recipe.source, ", ".join(missing), len(rows)),
        )


def template_error(recipe: Recipe, error: Exception) -> RecipeError:
    """The error for a chat template that fails on the data."""
    return RecipeError(
        f"{recipe.source}: the chat template cannot be applied to the data: {first_line(error)} It comes from "
        "`chat_template_path` or, without one, from the tokenizer."
    )


def check_adapted(recipe: Recipe, trainer: Trainer) -> None:
    """Refuses names of LoRA targets that are not in the model; PEFT would ignore them."""
    if not recipe.model.use_peft:
        return
    from peft.utils import ModulesToSaveWrapper

    model: Any = trainer.model
    saved = [name for name, module in model.named_modules() if isinstance(module, ModulesToSaveWrapper)]
    parameters = getattr(model.base_model, "targeted_parameter_names", ())
    for key, kind, found, such_as in (
        ("lora_target_parameters", "parameter", parameters, "named_parameters()`, such as 'experts.gate_up_proj'"),
        ("lora_modules_to_save", "module", saved, "named_modules()`, such as 'lm_head'"),
    ):
        asked = getattr(recipe.model, key) or ()
        missing = [name for name in asked if not any(f".{one}".endswith(f".{name}") for one in found)]
        if missing:
            raise RecipeError(
                f"{recipe.source}: `{key}` is {asked}, but no {kind} of {type(model).__name__} ends in "
                f"{', '.join(map(repr, missing))}; give ends of names in `model.{such_as}."
            )


def check_optimizer(recipe: Recipe, trainer: Trainer) -> None:
    """Refuses an optimizer that is not installed, or lacks an argument it needs."""
    optim: Any = trainer.args.optim
    model: Any = trainer.model
    try:
        trainer.get_optimizer_cls_and_kwargs(trainer.args, model)
    except (ImportError, ValueError) as error:
        raise RecipeError(
            f"{recipe.source}: `optim` is {getattr(optim, 'value', optim)!r}: {first_line(error)}"
        ) from error


def check_launch(recipe: Recipe, trainer: Trainer) -> None:
    """Warns if the recipe is written for a model that is split over GPUs, and this one is not."""
    name = recipe.recipe.accelerate_config
    if name is None:
        return
    meant = yaml.safe_load(accelerate_config(name).read_text(encoding="utf-8")).get("distributed_type")
    split = {"FSDP": trainer.is_fsdp_enabled, "DEEPSPEED": trainer.is_deepspeed_enabled}
    if not split.get(meant, True):
        logger.warning(
            "%s is written for `accelerate_config: %s`, but the model is not split here; start it on GPUs with "
            "`liger-trainer train`, or with `accelerate launch --config_file` and that configuration.",
            *(recipe.source, name),
        )


def _watch_routers(recipe: Recipe, trainer: Trainer) -> None:
    """Adds the callback of ``router_balance``, before all others, so that every reporter sees its numbers."""
    if not recipe.recipe.router_balance:
        return
    model: Any = trainer.model
    if not any(experts_of(model)):
        raise RecipeError(
            f"{recipe.source}: `router_balance` is true, but {type(model).__name__} has {NO_EXPERTS}; leave it out."
        )
    trainer.callback_handler.callbacks.insert(0, RouterBalanceCallback())
