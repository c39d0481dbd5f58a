"""The model of a recipe: its configuration, checked, and the model, loaded or new."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from liger_trainer.configs.flags import kernel_config_of, packed_base_of
from liger_trainer.packed.formats import METHODS, format_name, reason_against
from liger_trainer.packed.loading import method_of, quantization_of
from liger_trainer.packed.modelopt import settings_of_file
from liger_trainer.recipe.experts import check_expert_parallel, check_loading_in_4_bits, expert_parallel_config
from liger_trainer.recipe.file import RecipeError, first_line
from liger_trainer.recipe.known_models import PUBLISHED
from liger_trainer.recipe.load import Recipe
from liger_trainer.recipe.schema import TRAINERS, mapping
from liger_trainer.trainers.checks.packed_base import keeps_packed

logger = logging.getLogger(__name__)

_BY_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_ADVICE = (
    "A local folder must hold a config.json; a name on the Hub needs the network, and `HF_TOKEN` with access where it "
    "is private or gated."
)


def check_model(recipe: Recipe) -> None:
    """Checks, before any data is loaded, that exactly one model is named and that this launch can train it."""
    name = recipe.model.model_name_or_path
    if is_quantised(recipe) and importlib.util.find_spec("bitsandbytes") is None:
        key = "load_in_4bit" if recipe.model.load_in_4bit else "load_in_8bit"
        raise RecipeError(
            f"{recipe.source}: `{key}: true` needs bitsandbytes, which is not installed. Install it with `pip install "
            "'liger-trainer[qlora]'`, or set the key to false for a base in its own dtype."
        )
    config = config_of_recipe(recipe)
    if name is not None:
        check_weights(name, f"`model_name_or_path`: {name!r}")
    check_packed_base({**vars(recipe.model), **vars(recipe.training)}, config, recipe.source)
    if recipe.recipe.expert_parallel_size > 1:
        check_expert_parallel(recipe, config)
    if recipe.model.load_in_4bit:
        check_loading_in_4_bits(recipe.source, recipe.recipe.trainer, config)


def config_of_recipe(recipe: Recipe) -> PreTrainedConfig:
    """The configuration of the model that a recipe names, or describes in ``model_config``."""
    trusted = {"trust_remote_code": recipe.get("trust_remote_code")}
    return config_of_values({**vars(recipe.recipe), **vars(recipe.model), **trusted}, recipe.source)


def config_of_values(values: Mapping[str, Any], source: Path, packaged: bool = False) -> PreTrainedConfig:
    """The configuration of the model that the keys of a recipe name or describe: one model, a causal language model.

    The latter is not needed for ``trainer: "reward"``. If it is `packaged` (`PUBLISHED`), the Hub need not be asked.
    """
    name, settings = values.get("model_name_or_path"), values.get("model_config")
    if (name is None) == (settings is None):
        both = "both" if name else "neither"
        raise RecipeError(f"{source}: give either `model_name_or_path` or `model_config`, not {both}.")
    if name is not None:
        given, revision = f"`model_name_or_path`: {name!r}", values.get("model_revision", "main")
        published = published_config(name, revision) if packaged else None
        trusted = bool(values.get("trust_remote_code"))
        config = published or read_config(name, "`model_name_or_path`", revision, trusted)
    else:
        given = f"{source}: `model_config`"
        try:
            settings = mapping("model_config", settings) or {}
        except ValueError as error:
            raise RecipeError(f"{source}: {error}") from error
        config = make_config(settings, given)
        if values.get("tokenizer_vocab_size") and not _has_vocab_size(settings):
            config.get_text_config().vocab_size = values["tokenizer_vocab_size"]
    if not TRAINERS[values.get("trainer", "sft")].scores:
        check_causal(config, given)
    key, form = next((key for key in _BY_BITSANDBYTES if values.get(key)), None), published_form(config)
    if key is not None and form is not None:
        raise RecipeError(
            f"{source}: `{key}` is true, but {name!r} is quantised already ({form}). Leave `{key}` out, or give a "
            "checkpoint in 16 bits."
        )
    return config


def published_form(config: PreTrainedConfig) -> str | None:
    """The format of a quantised checkpoint; None of one in 16 bits, and of bitsandbytes, which loads its own again."""
    form = format_name(quantization_of(config))
    return None if form in ("bitsandbytes", "nf4", "fp4") else form


def positions_of(config: PreTrainedConfig) -> int | None:
    """How many positions the language model of `config` has, stretched by its rotary embedding; None if unlimited."""
    text = config.get_text_config()
    most, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if not most or not isinstance(
        rope.get("factor"), (int, float)
    ):  # each type of layer may have a rotation of its own
        return most
    return max(most, int(rope["factor"] * (rope.get("original_max_position_embeddings") or most)))


def check_weights(folder: str, given: str) -> None:
    """Checks that the safetensors files in `folder` are complete; a name on the Hub is no folder and has none."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass  # opening it reads the header and compares it with the file size
        except SafetensorError as error:
            raise RecipeError(
                f"{given}: {str(file)!r} is damaged or not a safetensors file: {first_line(error)} Copy it again."
            ) from error


def is_quantised(recipe: Recipe) -> bool:
    """Whether bitsandbytes quantises the base model as it is loaded."""
    return bool(recipe.model.load_in_4bit or recipe.model.load_in_8bit)


def model_source(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, resumed: bool) -> str | PreTrainedModel:
    """The name or folder to load the model from, or a new model that needs no loading."""
    if recipe.model.model_name_or_path is not None:
        return recipe.model.model_name_or_path
    saved = recipe.kind.from_folder or recipe.model.use_peft or is_quantised(recipe)
    if saved or recipe.recipe.expert_parallel_size > 1:
        return saved_new_model(recipe, tokenizer, resumed)
    return new_model(recipe, tokenizer)


def saved_new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, resumed: bool) -> str:
    """The folder in ``output_dir`` with the new model of ``model_config``; a resumed run uses the one it started with.

    It is saved because a reference model is loaded from the policy's source, because models are quantised and split as
    they are loaded, and because adapters are nothing without their base.
    """
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
        raise RecipeError(
            f"{str(folder)!r}, the model that the run started with, is missing. Resume a run that started without "
            "adapters without them (`use_peft: false`); start any other again."
        )
    return str(folder)


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A model with random weights from ``model_config``; the vocabulary is the tokenizer's unless it is set."""
    settings = dict(recipe.recipe.model_config or {})
    config = AutoConfig.for_model(**settings)
    text = config.get_text_config()
    if not _has_vocab_size(settings):
        text.vocab_size = len(tokenizer)
    for owner in {id(config): config, id(text): text}.values():
        owner.pad_token_id = tokenizer.pad_token_id
        owner.bos_token_id = tokenizer.bos_token_id
        owner.eos_token_id = tokenizer.eos_token_id
    dtype = recipe.model.dtype if recipe.model.dtype not in (None, "auto") else "float32"
    return model_class(config).from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention(recipe))


def _has_vocab_size(settings: Mapping[str, Any]) -> bool:
    return "vocab_size" in {**settings, **(settings.get("text_config") or {})}


def load_model(recipe: Recipe, source: str, **overrides: Any) -> Any:
    """Loads the model from a name or folder; `overrides` are keyword arguments that win over the recipe's."""
    kwargs = {**model_kwargs(recipe), "trust_remote_code": recipe.get("trust_remote_code"), **overrides}
    return model_class(config_of(recipe, source)).from_pretrained(source, **kwargs)


def config_of(recipe: Recipe, source: str) -> PreTrainedConfig:
    """The configuration of the model in `source`, as `model_source` gives it."""
    trusted = recipe.get("trust_remote_code")
    return AutoConfig.from_pretrained(source, revision=recipe.model.model_revision, trust_remote_code=trusted)


def model_kwargs(recipe: Recipe) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained``."""
    from trl import get_quantization_config

    kwargs: dict[str, Any] = {
        "revision": recipe.model.model_revision,
        "dtype": recipe.model.dtype,
        "attn_implementation": attention(recipe),
    }
    quantization = get_quantization_config(recipe.model) or _dequantised(config_of_recipe(recipe), recipe)
    if quantization is not None:
        kwargs["quantization_config"] = quantization
    if recipe.recipe.expert_parallel_size > 1:
        kwargs["distributed_config"] = expert_parallel_config(recipe)
    return kwargs


def _dequantised(config: PreTrainedConfig, recipe: Recipe) -> Any:
    """What loads an MXFP4 checkpoint in 16 bits, as transformers trains no packed experts; None for any other.

    None too where it stays packed, under adapters.
    """
    if method_of(config) != "mxfp4" or stays_packed(recipe, config):
        return None
    from transformers.utils.quantization_config import Mxfp4Config

    logger.warning("%s: the experts, MXFP4 in the checkpoint, are loaded in 16 bits.", recipe.source)
    return Mxfp4Config(dequantize=True)


def stays_packed(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """Whether the weights of a checkpoint with this configuration stay packed in this run."""
    return method_of(config) is not None and keeps_packed(recipe.training, bool(recipe.model.use_peft))


def check_packed_base(values: Mapping[str, Any], config: PreTrainedConfig, source: Path) -> None:
    """Checks that a checkpoint that is to stay packed can, as far as its configuration and the recipe's keys say.

    Raises:
        RecipeError: If `packed_base` is true for a checkpoint that is not in few bits, and for a format, adapters or a
            generation that a packed base cannot have.
    """
    name, arguments = values.get("model_name_or_path"), SimpleNamespace(**values)
    given = f"`model_name_or_path` {name!r}" if name else "`model_config`"
    if method_of(config) is None:
        if packed_base_of(arguments):
            raise RecipeError(
                f"{source}: `packed_base` is true, but {given} is not in few bits: its configuration names none of "
                f"{', '.join(METHODS)}. Give a checkpoint in one of these formats, or leave `packed_base` out."
            )
        return
    if not keeps_packed(arguments, bool(values.get("use_peft"))):
        return
    key = next((key for key in ("use_dora", "use_vllm") if values.get(key)), None)
    if key is not None:
        why = "DoRA reads the base's weights" if key == "use_dora" else "vLLM gets the adapters merged into the base"
        raise RecipeError(
            f"{source}: `{key}` is true: {why}, and those of {given} stay packed. Set `{key}` or `packed_base` to "
            "false."
        )
    if reason := reason_against(quantization_of(config)):
        raise RecipeError(
            f"{source}: `packed_base`: {given} cannot stay packed: {reason}. Set `packed_base` to false, or give "
            "another checkpoint."
        )


def attention(recipe: Recipe) -> str | None:
    """``attn_implementation``; None leaves it to transformers: SDPA, or eager attention for a class without SDPA.

    ``"auto"`` is None where our attention is on, which takes the place of both. Where it is off, ``"auto"`` is flash
    attention if its package and a GPU are available, else None.
    """
    asked = recipe.model.attn_implementation
    if asked != "auto":
        return asked
    if recipe.training.use_liger_kernel and kernel_config_of(recipe.training).attention:
        logger.info("`attn_implementation: auto` leaves attention to liger_trainer.")
        return None
    half = recipe.model.dtype in ("bfloat16", "float16")
    flash = half and torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None
    chosen = "flash_attention_2" if flash and not recipe.training.use_cpu else None
    logger.info("`attn_implementation: auto` takes %s.", chosen or "transformers' default")
    return chosen


def lora_advice(error: Exception, recipe: Recipe) -> str:
    """The names that `lora_target_modules` may have, if `error` is PEFT's for names not found; else empty."""
    if "arget modules" not in str(error) or not recipe.model.use_peft:
        return ""
    config = config_of_recipe(recipe)
    with torch.device("meta"):
        model = model_class(config).from_config(config, trust_remote_code=recipe.get("trust_remote_code"))
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    names = dict.fromkeys(name.rpartition(".")[2] for name in linear)
    return f" `lora_target_modules` is {recipe.model.lora_target_modules}; its linear layers are {', '.join(names)}."


def make_config(settings: Mapping[str, Any], given: str) -> PreTrainedConfig:
    """The configuration that ``model_config`` describes; messages start with `given`."""
    _check_sizes(settings, given)
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # each configuration class has its own checks and errors
        raise RecipeError(f"{given}: {first_line(error)}") from error


def read_config(name: str, key: str, revision: str = "main", trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the model `name`, which the user gave as `key`."""
    if name.startswith(("/", "./", "../", "~")) or Path(name).is_dir():
        if not Path(name).exists():
            raise RecipeError(f"{key}: there is no folder {name!r} (looked from {Path.cwd()}).")
        if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
            raise RecipeError(f"{key}: the folder {name!r} holds no config.json.")
    given = f"{key}: {name!r}"
    try:
        if Path(name).exists():
            _check_sizes(PreTrainedConfig.get_config_dict(name)[0], given)
        else:
            _reach_hub(name, revision)
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
        if quantization_of(config) is None and (settings := settings_of_file(name, revision)) is not None:
            config.quantization_config = settings
        return config
    except RecipeError:
        raise
    except Exception as error:  # each configuration class has its own checks and errors
        advice = _ADVICE
        if "custom code" in str(error):
            advice = "Read that code, and set `trust_remote_code: true` to run it."
        raise RecipeError(f"{given} cannot be loaded: {first_line(error)} {advice}") from error


def published_config(name: str, revision: str = "main") -> PreTrainedConfig | None:
    """The packaged configuration of a model that the shipped recipes name; None for any other model."""
    if name not in PUBLISHED or revision != "main" or Path(name).exists():
        return None
    return make_config(PUBLISHED[name], name)


def _check_sizes(settings: Mapping[str, Any], given: str) -> None:
    """Refuses sizes that are not positive whole numbers; configuration classes do not check them."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            _check_sizes(value, f"{given}: `{key}`")
        elif key in _SIZES and value is not None and not (type(value) is int and value >= 1):
            raise RecipeError(f"{given}: `{key}` is {value!r}; it must be a whole number, 1 or more.")


def _reach_hub(name: str, revision: str) -> None:
    """Asks the Hub for a configuration that is not in the cache; transformers would retry for 20 seconds."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        with contextlib.suppress(HfHubHTTPError):  # the Hub answered; transformers explains its error
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except Exception as error:  # errors of the HTTP library below
        raise ConnectionError(f"the Hub cannot be reached: {first_line(error)}") from error


def model_class(config: PreTrainedConfig) -> Any:
    """The auto class for `config`; for a multimodal configuration that of the whole model, not of its text part."""
    multimodal = config.get_text_config() is not config
    if multimodal and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def check_causal(config: PreTrainedConfig, given: str) -> None:
    """Refuses an encoder, with or without a decoder; its tokens would learn to copy those after them."""
    if config.is_encoder_decoder:
        kind, wrong = "an encoder with a decoder", type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
    else:
        masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING
        kind, wrong = "an encoder", masked and getattr(config, "is_decoder", None) is False
    if wrong:
        raise RecipeError(
            f"{given}: `model_type` {config.model_type!r} is {kind}, but this trainer needs a causal language model, "
            "whose tokens see only those before them. Use one, such as a Llama or a Qwen."
        )
