"""Runs a recipe: data, tokenizer, model, trainer, training, evaluation, and the summary at the end."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe import Recipe
from liger_trainer.recipe_data import load_data, load_tokenizer, text_blocks
from liger_trainer.recipe_file import RecipeError, first_line
from liger_trainer.recipe_output import prepare_output_dir

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Trainer

logger = logging.getLogger(__name__)


def run_recipe(recipe: Recipe) -> Trainer:
    """Trains what `recipe` says and leaves the model, the tokenizer, the log and the loss curve in ``output_dir``.

    Returns:
        The trainer, after training.

    Raises:
        RecipeError: for anything in the recipe or its data that is found wrong before training starts.
    """
    from transformers import set_seed

    from liger_trainer.recipe_summary import summarize
    from liger_trainer.trainers.batch_check import BatchError

    args = recipe.training
    if args.n_gpu > 1:
        raise RecipeError(
            f"One process sees {args.n_gpu} GPUs, which would run `nn.DataParallel`; start one process a GPU with "
            "`accelerate launch --multi_gpu` or `liger-trainer train --accelerate_config ddp`, or set "
            "CUDA_VISIBLE_DEVICES=0."
        )
    check_model(recipe)
    checkpoint = prepare_output_dir(recipe)
    set_seed(args.seed)
    train, evaluation = load_data(recipe)
    tokenizer = load_tokenizer(recipe, train, checkpoint)
    build = build_sft if recipe.recipe.trainer == "sft" else build_causal_lm
    try:
        trainer = build(recipe, tokenizer, train, evaluation)
    except RecipeError:
        raise
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        raise RecipeError(f"{recipe.source}: {first_line(error)}") from error
    check_vocabulary(trainer, tokenizer)

    try:
        result = trainer.train(resume_from_checkpoint=checkpoint)
    except BatchError as error:
        raise RecipeError(f"The data: {first_line(error)}") from error
    finally:
        close_progress_bar(trainer)
    metrics = dict(result.metrics)
    if evaluation is not None:
        metrics.update(last_evaluation(trainer) or trainer.evaluate())
    trainer.save_model(args.output_dir)
    trainer.save_state()
    trainer.save_metrics("all", metrics, combined=False)
    if args.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        summarize(recipe, trainer, metrics)
    return trainer


def close_progress_bar(trainer: Trainer) -> None:
    """Ends the bar's line: left open by an error, it would be drawn once more below the message."""
    for callback in trainer.callback_handler.callbacks:
        bar = getattr(callback, "training_bar", None)
        if bar is not None:
            bar.close()


def last_evaluation(trainer: Trainer) -> dict[str, float]:
    """What was logged where the last step ended in an evaluation of the model as it is now; else nothing."""
    if trainer.args.load_best_model_at_end:
        return {}
    entries = (entry for entry in trainer.state.log_history if entry["step"] == trainer.state.global_step)
    return next((dict(entry) for entry in entries if "eval_loss" in entry), {})


def read_config(name: str, key: str, revision: str = "main", trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the model `name`, which the user gave as `key`.

    Raises:
        RecipeError: if there is no such folder, or no such model on the Hub.
    """
    from transformers import AutoConfig

    if name.startswith(("/", "./", "../", "~")) or Path(name).is_dir():
        if not Path(name).exists():
            raise RecipeError(f"{key}: there is no folder {name!r} (looked from {Path.cwd()}).")
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise RecipeError(f"{key}: the folder {name!r} holds no config.json.")
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{key}: {name!r} cannot be loaded: {first_line(error)} A local folder must hold a config.json; a name on "
            "the Hub needs the network, and `HF_TOKEN` with access where it is private or gated."
        ) from error


def check_model(recipe: Recipe) -> None:
    """Checks, before any data is loaded, that the model is named once and its configuration can be read.

    Raises:
        RecipeError: if it is not.
    """
    from transformers import AutoConfig

    name, config = recipe.model.model_name_or_path, recipe.recipe.model_config
    if (name is None) == (config is None):
        raise RecipeError(
            f"{recipe.source}: give either `model_name_or_path` or `model_config`, not {'both' if name else 'neither'}."
        )
    if config is not None:
        try:
            AutoConfig.for_model(**config)
        except Exception as error:  # a configuration class checks its values in its own way
            raise RecipeError(f"{recipe.source}: `model_config`: {error}") from error
        return
    assert name is not None
    read_config(name, "`model_name_or_path`", recipe.model.model_revision, recipe.text_arguments.trust_remote_code)


def attention(recipe: Recipe) -> str | None:
    """``attn_implementation``; ``"auto"`` is flash attention where its package and a GPU are there, else SDPA."""
    import torch

    asked = recipe.model.attn_implementation
    if asked != "auto":
        return asked
    half = recipe.model.dtype in ("bfloat16", "float16")
    flash = half and torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    chosen = "flash_attention_2" if flash and not recipe.training.use_cpu else "sdpa"
    logger.info("`attn_implementation: auto` takes %s.", chosen)
    return chosen


def model_kwargs(recipe: Recipe) -> dict[str, Any]:
    """What ``from_pretrained`` gets beside the name."""
    from trl import get_quantization_config

    kwargs: dict[str, Any] = {
        "revision": recipe.model.model_revision,
        "dtype": recipe.model.dtype,
        "attn_implementation": attention(recipe),
    }
    quantization = get_quantization_config(recipe.model)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    if recipe.training.gradient_checkpointing:
        kwargs["use_cache"] = False
    return kwargs


def model_class(config: PreTrainedConfig) -> Any:
    """The auto class for `config`: a multimodal configuration stands for the whole model, not for its text part."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    multimodal = config.get_text_config() is not config
    if multimodal and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model with random weights from ``model_config``; the tokenizer gives the vocabulary where that is not set."""
    import torch
    from transformers import AutoConfig

    settings = dict(recipe.recipe.model_config or {})
    config = AutoConfig.for_model(**settings)
    text = config.get_text_config()
    if "vocab_size" not in {**settings, **(settings.get("text_config") or {})}:
        text.vocab_size = len(tokenizer)
    for owner in {id(config): config, id(text): text}.values():
        owner.pad_token_id = tokenizer.pad_token_id
        owner.bos_token_id = tokenizer.bos_token_id
        owner.eos_token_id = tokenizer.eos_token_id
    dtype = recipe.model.dtype if recipe.model.dtype not in (None, "auto") else "float32"
    return model_class(config).from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention(recipe))


def build_sft(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any, evaluation: Any) -> Trainer:
    """The trainer of ``trainer: "sft"``."""
    from trl import get_peft_config

    from liger_trainer.trainers.sft_trainer import LigerSFTTrainer

    args: Any = recipe.training
    model: Any = recipe.model.model_name_or_path
    if model is None:
        model = new_model(recipe, tokenizer)
    else:
        args.model_init_kwargs = {**model_kwargs(recipe), **(args.model_init_kwargs or {})}
    args.chat_template_path = chat_template(args.chat_template_path)
    # Without a tokenizer of the recipe's own, TRL loads the model's processor, which may be more than a tokenizer.
    ours = recipe.recipe.tokenizer_name_or_path or recipe.recipe.tokenizer_vocab_size
    return LigerSFTTrainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=evaluation,
        processing_class=tokenizer if ours else None,
        peft_config=get_peft_config(recipe.model),
    )


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


def build_causal_lm(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, train: Any, evaluation: Any) -> Trainer:
    """The trainer of ``trainer: "causal_lm"``: plain text in blocks, every token a target."""
    from transformers import AutoConfig, default_data_collator
    from trl import get_peft_config

    from liger_trainer.trainers.trainer import LigerTrainer

    model: Any
    if recipe.recipe.model_config is not None:
        model = new_model(recipe, tokenizer)
    else:
        name, trusted = str(recipe.model.model_name_or_path), recipe.text_arguments.trust_remote_code
        config = AutoConfig.from_pretrained(name, revision=recipe.model.model_revision, trust_remote_code=trusted)
        model = model_class(config).from_pretrained(name, trust_remote_code=trusted, **model_kwargs(recipe))
    peft_config = get_peft_config(recipe.model)
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
