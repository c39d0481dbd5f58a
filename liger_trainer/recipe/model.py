"""The model of a recipe: found, checked, or made new."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe import Recipe
from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.model_config import check_causal, make_config, model_class, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def check_weights(folder: str, given: str) -> None:
    """Checks that the files of weights in `folder` are whole; a name on the Hub, whose files are checked, holds none.

    Raises:
        RecipeError: naming the file that is not.
    """
    from safetensors import SafetensorError, safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass  # which reads its header and compares it with its length
        except SafetensorError as error:
            raise RecipeError(
                f"{given}: {str(file)!r} is damaged or no safetensors file: {first_line(error)} Copy it again."
            ) from error


def is_quantised(recipe: Recipe) -> bool:
    """Whether the base model is to be quantised by bitsandbytes as it is loaded."""
    return bool(recipe.model.load_in_4bit or recipe.model.load_in_8bit)


def check_model(recipe: Recipe) -> None:
    """Checks, before any data is loaded, that the model is named once and its configuration can be read.

    It also checks that bitsandbytes is there where the model is to be quantised, that experts can be, and that the
    processes of this launch can share the experts where they are to be split.

    Raises:
        RecipeError: if it is not.
    """
    name, config = recipe.model.model_name_or_path, recipe.recipe.model_config
    if is_quantised(recipe) and importlib.util.find_spec("bitsandbytes") is None:
        key = "load_in_4bit" if recipe.model.load_in_4bit else "load_in_8bit"
        raise RecipeError(
            f"{recipe.source}: `{key}: true` needs bitsandbytes, which is not installed. Install it with `pip install "
            "'liger-trainer[qlora]'`, or set the key to false for a base in its own dtype."
        )
    if (name is None) == (config is None):
        raise RecipeError(
            f"{recipe.source}: give either `model_name_or_path` or `model_config`, not {'both' if name else 'neither'}."
        )
    if config is not None:
        given = f"{recipe.source}: `model_config`"
        found = make_config(config, given)
    else:
        given = f"`model_name_or_path`: {name!r}"
        trusted = recipe.get("trust_remote_code")
        found = read_config(str(name), "`model_name_or_path`", recipe.model.model_revision, trusted)
        check_weights(str(name), given)
    if recipe.recipe.trainer != "reward":
        check_causal(found, given)
    if recipe.recipe.expert_parallel_size > 1:
        _check_experts(recipe, found)
    if recipe.model.load_in_4bit:
        from liger_trainer.recipe.experts import check_loading_in_4_bits

        check_loading_in_4_bits(recipe.source, recipe.recipe.trainer, found)


def _check_experts(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Checks that the experts of `config` can be split over `expert_parallel_size` of the processes."""
    size = recipe.recipe.expert_parallel_size
    check_expert_count(recipe.source, size, config)
    if (way := splits_of_launch()) is not None:
        raise RecipeError(
            f"{recipe.source}: `expert_parallel_size` is {size}, which splits the whole model, but the launch splits "
            f"it with {way}; launch it with `--accelerate_config ddp`, or set `expert_parallel_size: 1`."
        )
    expert_parallel_config(recipe)


def splits_of_launch() -> str | None:
    """With what this launch splits a model; None where it does not."""
    from accelerate.utils import parse_flag_from_env

    ways = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}
    return next((way for flag, way in ways.items() if parse_flag_from_env(flag)), None)


def check_expert_count(source: Path, size: int, config: PreTrainedConfig) -> None:
    """Checks that `size` processes can share the experts of a model of `config`.

    Raises:
        RecipeError: if they cannot.
    """
    text, experts = config.get_text_config(), count_experts(config)
    given = f"{source}: `expert_parallel_size` is {size}, but"
    if not experts:
        raise RecipeError(
            f"{given} the configuration of the model ({text.model_type}) names no experts; leave it out for a dense "
            "model."
        )
    if not can_split_experts(config):
        raise RecipeError(
            f"{given} transformers cannot split the experts of this model ({text.model_type}): its configuration has "
            "no plan for that; set `expert_parallel_size: 1` and `accelerate_config: fsdp2`."
        )
    if experts % size:
        raise RecipeError(f"{given} the model has {experts} experts a layer; it must be a divisor of {experts}.")


def count_experts(config: PreTrainedConfig) -> int:
    """Routed experts of a layer of a model of `config`; 0 where it names none."""
    names, text = ("num_experts", "num_local_experts", "n_routed_experts"), config.get_text_config()
    return next((count for count in (getattr(text, name, None) for name in names) if count), 0)


def can_split_experts(config: PreTrainedConfig) -> bool:
    """Whether transformers brings tokens to experts of other processes, in a model of `config`."""
    plan = getattr(config.get_text_config(), "base_model_ep_plan", None) or {}
    return "ep_dispatch_experts" in plan.values()


def lora_advice(error: Exception, recipe: Recipe) -> str:
    """What `lora_target_modules` may name, where PEFT says that it names nothing; else nothing."""
    import torch
    from transformers import AutoConfig

    if "arget modules" not in str(error) or not recipe.model.use_peft:
        return ""
    trusted = recipe.get("trust_remote_code")
    if recipe.recipe.model_config is not None:
        config: Any = AutoConfig.for_model(**recipe.recipe.model_config)
    else:
        config = read_config(str(recipe.model.model_name_or_path), "`model_name_or_path`", "main", trusted)
    with torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=trusted)
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    names = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    return f" `lora_target_modules` is {recipe.model.lora_target_modules}; its linear layers are {', '.join(names)}."


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
    if recipe.recipe.expert_parallel_size > 1:
        kwargs["distributed_config"] = expert_parallel_config(recipe)
    return kwargs


def expert_parallel_config(recipe: Recipe) -> dict[str, int]:
    """How `from_pretrained` splits the model over the processes of this launch, with ``expert_parallel_size``.

    Raises:
        RecipeError: if that many processes cannot share the experts.
    """
    size, processes = recipe.recipe.expert_parallel_size, int(os.environ.get("WORLD_SIZE", "1"))
    if processes % size:
        raise RecipeError(
            f"{recipe.source}: `expert_parallel_size` is {size}, but the number of processes is {processes}; launch a "
            f"multiple of {size}: `liger-trainer train RECIPE --accelerate_config ddp --num_processes {size}`."
        )
    return {"fsdp_size": processes, "ep_size": size}


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


def model_source(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, resumed: bool) -> str | PreTrainedModel:
    """The name or the folder that the model is loaded from, or a new one that need not be.

    Args:
        recipe: The recipe.
        tokenizer: Of the model.
        resumed: Whether the run goes on from a checkpoint.
    """
    if recipe.model.model_name_or_path is not None:
        return recipe.model.model_name_or_path
    if recipe.kind.from_folder or is_quantised(recipe) or recipe.recipe.expert_parallel_size > 1:
        return saved_new_model(recipe, tokenizer, resumed)
    return new_model(recipe, tokenizer)


def saved_new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, resumed: bool) -> str:
    """The folder in ``output_dir`` that holds the model of ``model_config``; a resumed run takes the one it had.

    A trainer with a reference model loads it from where the policy came from, and a model is quantised, and
    split, as it is loaded.

    Raises:
        RecipeError: if a resumed run finds none.
    """
    from accelerate import PartialState

    folder = Path(str(recipe.training.output_dir)) / "initial_model"
    state = PartialState()
    if not resumed and state.is_main_process:
        unfinished = folder.with_name("initial_model.unfinished")
        for stale in (folder, unfinished):
            shutil.rmtree(stale, ignore_errors=True)
        new_model(recipe, tokenizer).save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    state.wait_for_everyone()
    if not folder.is_dir():
        raise RecipeError(f"The model that the run began with is not in {str(folder)!r} any more; start the run again.")
    return str(folder)
