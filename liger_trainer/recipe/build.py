"""The trainer of a recipe, from its arguments, model, tokenizer and data."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from liger_trainer.recipe import Recipe
from liger_trainer.recipe.data import text_blocks
from liger_trainer.recipe.experts import with_experts_in_4_bits
from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.model import model_kwargs, model_source
from liger_trainer.recipe.model_config import model_class
from liger_trainer.recipe.rewards import load_reward_functions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Trainer


def build_trainer(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any, evaluation: Any, resumed: bool
) -> Trainer:
    """The trainer that `recipe` says, ready to train.

    Args:
        recipe: The recipe.
        tokenizer: As `load_tokenizer` gives it.
        train: Rows to train on.
        evaluation: Rows to evaluate on, or None.
        resumed: Whether the run goes on from a checkpoint.
    """
    if recipe.recipe.trainer == "causal_lm":
        return _build_causal_lm(recipe, tokenizer, train, evaluation, resumed)
    from trl import get_peft_config

    args: Any = recipe.training
    model: Any = model_source(recipe, tokenizer, resumed)
    model, peft_config = with_experts_in_4_bits(recipe, model, get_peft_config(_with_task_type(recipe)))
    if isinstance(model, str):
        # Without a device map of its own, ORPO and CPO would spread the model over the devices.
        kwargs = {"device_map": None, **model_kwargs(recipe), **(args.model_init_kwargs or {})}
        args.model_init_kwargs = kwargs
    if hasattr(args, "chat_template_path"):
        args.chat_template_path = chat_template(args.chat_template_path)
    functions = load_reward_functions(recipe.more)
    return recipe.kind.trainer_class(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=_processing_class(recipe, tokenizer, train),
        peft_config=peft_config,
        **({"reward_funcs": functions} if functions else {}),
    )


def _processing_class(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any) -> PreTrainedTokenizerBase | None:
    """None, with which TRL loads the model's processor, where that may have to be more than a tokenizer."""
    ours = recipe.recipe.tokenizer_name_or_path or recipe.recipe.tokenizer_vocab_size
    pictures = {"image", "images"} & set(train.column_names or ())
    return tokenizer if ours or (recipe.recipe.trainer != "sft" and not pictures) else None


def _with_task_type(recipe: Recipe) -> Any:
    scored = recipe.recipe.trainer == "reward"
    return dataclasses.replace(recipe.model, lora_task_type="SEQ_CLS") if scored else recipe.model


def chat_template(name: str | None) -> str | None:
    """``chat_template_path``, where the bare name of one of the templates that TRL ships is good too.

    Raises:
        RecipeError: if a .jinja file is named that is not there.
    """
    import trl

    if name is None or Path(name).exists():
        return name
    shipped = Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja"
    if shipped.is_file():
        return str(shipped)
    if name.endswith((".jinja", ".j2")):
        raise RecipeError(f"`chat_template_path`: there is no file {name!r}.")
    return name


def _build_causal_lm(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any, evaluation: Any, resumed: bool
) -> Trainer:
    """The trainer of ``trainer: "causal_lm"``: plain text in blocks, every token a target."""
    from transformers import AutoConfig, default_data_collator
    from trl import get_peft_config

    from liger_trainer.trainers.trainer import LigerTrainer

    model: Any = model_source(recipe, tokenizer, resumed)
    model, peft_config = with_experts_in_4_bits(recipe, model, get_peft_config(recipe.model))
    if isinstance(model, str):
        trusted = recipe.get("trust_remote_code")
        config = AutoConfig.from_pretrained(model, revision=recipe.model.model_revision, trust_remote_code=trusted)
        model = model_class(config).from_pretrained(model, trust_remote_code=trusted, **model_kwargs(recipe))
    if peft_config is not None:
        from peft import get_peft_model

        model = get_peft_model(model, peft_config)
    return LigerTrainer(
        model=model,
        args=recipe.training,
        train_dataset=text_blocks(train, tokenizer, recipe),
        eval_dataset=None if evaluation is None else text_blocks(evaluation, tokenizer, recipe),
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )


def check_vocabulary(trainer: Trainer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer with ids the model has no row for: on a GPU they would end in a device-side assert.

    Raises:
        RecipeError: if there are more tokens than rows.
    """
    model: Any = trainer.model
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise RecipeError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model's embedding has {rows} rows; take the model's "
            "own tokenizer, or set `vocab_size` in `model_config` to at least the number of tokens."
        )


def check_prompts(recipe: Recipe, trainer: Trainer, train: Any) -> None:
    """Refuses prompts without a token, and a chat template that fails for the first one; both end a step otherwise.

    Raises:
        RecipeError: saying which.
    """
    row = next(iter(train)) if recipe.kind.data == "prompt" else {}
    prompt = row.get("prompt")
    processor: Any = trainer.processing_class
    empty = isinstance(prompt, str) and hasattr(train, "data") and "" in train.unique("prompt")
    if empty and not processor(text="")["input_ids"]:
        raise RecipeError("The column `prompt` holds empty text, of which the tokenizer makes no token; remove it.")
    if not isinstance(prompt, list) or {"image", "images"} & set(row):  # TRL adds pictures to the turns
        return
    options = getattr(trainer.args, "chat_template_kwargs", None) or {}
    try:
        processor.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **options)
    except (TemplateError, ValueError) as error:
        raise template_error(recipe, error) from error


def template_error(recipe: Recipe, error: Exception) -> RecipeError:
    """The error for a chat template that fails on the data."""
    return RecipeError(
        f"{recipe.source}: the chat template cannot be applied to the data: {first_line(error)} It is that of "
        "`chat_template_path`, or else the tokenizer's."
    )


def check_targets(recipe: Recipe, trainer: Trainer) -> None:
    """Refuses rows of one token or none, which have no next token to learn and train nothing.

    Raises:
        RecipeError: if there are no others.
    """
    rows: Any = trainer.train_dataset
    if not hasattr(rows, "data") or "input_ids" not in rows.column_names:  # streamed, or prepared as batches are made
        return
    import pyarrow.compute as pc

    longest = pc.max(pc.list_value_length(rows.data.column("input_ids"))).as_py()
    if longest is not None and longest < 2:
        raise RecipeError(
            f"{recipe.source}: no row has more than {longest} token, so there is nothing to learn; check the data."
        )


def check_adapted(recipe: Recipe, trainer: Trainer) -> None:
    """Refuses names of what LoRA shall adapt or train that are not in the model; PEFT leaves them out.

    Raises:
        RecipeError: naming them.
    """
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
    """Refuses an optimizer that is not installed, or lacks an argument it needs.

    Raises:
        RecipeError: saying which.
    """
    optim: Any = trainer.args.optim
    try:
        trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)  # type: ignore[arg-type]
    except (ImportError, ValueError) as error:
        raise RecipeError(f"{recipe.source}: `optim` is {optim.value!r}: {first_line(error)}") from error
