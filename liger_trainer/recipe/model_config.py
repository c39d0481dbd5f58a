"""The configuration of a recipe's model: read or made, checked, and the class that it stands for."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe.file import RecipeError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_ADVICE = (
    "A local folder must hold a config.json; a name on the Hub needs the network, and `HF_TOKEN` with access where it "
    "is private or gated."
)


def make_config(settings: Mapping[str, Any], given: str) -> PreTrainedConfig:
    """The configuration that ``model_config`` describes; `given` begins the messages.

    Raises:
        RecipeError: if it describes none.
    """
    from transformers import AutoConfig

    _check_sizes(settings, given)
    try:
        return AutoConfig.for_model(**settings)
    except Exception as error:  # a configuration class checks its values in its own way
        raise RecipeError(f"{given}: {first_line(error)}") from error


def read_config(name: str, key: str, revision: str = "main", trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of the model `name`, which the user gave as `key`.

    Raises:
        RecipeError: if there is no such folder, no such model on the Hub, or its configuration is wrong.
    """
    from transformers import AutoConfig, PreTrainedConfig

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
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    except RecipeError:
        raise
    except Exception as error:  # a configuration class checks its values in its own way
        advice = _ADVICE
        if "custom code" in str(error):
            advice = "Read that code, and set `trust_remote_code: true` to run it."
        raise RecipeError(f"{given} cannot be loaded: {first_line(error)} {advice}") from error


def published_config(name: str, revision: str = "main") -> PreTrainedConfig | None:
    """The configuration that comes with the package for a model of the shipped recipes; None for any other model."""
    from liger_trainer.recipe.published_configs import PUBLISHED

    if name not in PUBLISHED or revision != "main" or Path(name).exists():
        return None
    return make_config(PUBLISHED[name], name)


def _check_sizes(settings: Mapping[str, Any], given: str) -> None:
    """Refuses sizes that are no counts: a configuration class divides by some of them, and takes others as they are."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            _check_sizes(value, f"{given}: `{key}`")
        elif key in _SIZES and value is not None and not (type(value) is int and value >= 1):
            raise RecipeError(f"{given}: `{key}` is {value!r}; it must be a whole number, 1 or more.")


def _reach_hub(name: str, revision: str) -> None:
    """Asks the Hub for a configuration that is not in the cache: transformers would ask again for 20 seconds.

    Raises:
        ConnectionError: if the Hub does not answer.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        return
    try:
        with contextlib.suppress(HfHubHTTPError):  # an answer, which transformers explains
            get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))
    except Exception as error:  # of the library that it uses for its requests
        raise ConnectionError(f"the Hub cannot be reached: {first_line(error)}") from error


def model_class(config: PreTrainedConfig) -> Any:
    """The auto class for `config`: a multimodal configuration stands for the whole model, not for its text part."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    multimodal = config.get_text_config() is not config
    if multimodal and type(config) in AutoModelForImageTextToText._model_mapping:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def check_causal(config: PreTrainedConfig, given: str) -> None:
    """Checks that `config` is that of a causal language model, which predicts each token from those before it.

    Raises:
        RecipeError: for an encoder, whose tokens would learn to copy those after them, with or without a decoder.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    if config.is_encoder_decoder:
        kind, wrong = "an encoder with a decoder", type(config) not in AutoModelForCausalLM._model_mapping
    else:
        masked = type(config) in AutoModelForMaskedLM._model_mapping
        kind, wrong = "an encoder", masked and getattr(config, "is_decoder", None) is False
    if wrong:
        raise RecipeError(
            f"{given}: `model_type` {config.model_type!r} is {kind}, but this trainer needs a causal language model, "
            "whose tokens see only those before them. Take one, such as a Llama or a Qwen."
        )
