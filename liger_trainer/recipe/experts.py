"""A mixture of experts in 4 bits, of a recipe with `load_in_4bit`.

transformers loads the model into the host's memory, with its linear layers in 4 bits and its experts as they are;
adapters are made; and the experts go to the device weight by weight, in 4 bits. So the device never holds them in 16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe import Recipe
from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.model import count_experts, model_kwargs, splits_of_launch
from liger_trainer.recipe.model_config import model_class

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig

TRAINERS = ("sft", "causal_lm")
"""Those that are given a model with adapters as it is. Others would make a second adapter of it as the reference, for
which PEFT finds no weights in 4 bits, or are not tried."""


def check_loading_in_4_bits(source: Path, trainer: str, config: PreTrainedConfig) -> None:
    """Checks that a recipe with `load_in_4bit` can quantise the experts of a model of `config`, if it has any.

    Raises:
        RecipeError: if it cannot.
    """
    if not count_experts(config):
        return
    given = f"{source}: `load_in_4bit` is true and the model ({config.get_text_config().model_type}) has experts"
    if trainer not in TRAINERS:
        raise RecipeError(
            f"{given}, which train in 4 bits with `trainer` {' and '.join(TRAINERS)}, not with {trainer}; set "
            "`load_in_4bit: false`."
        )
    if (way := splits_of_launch()) is not None:
        raise RecipeError(
            f"{given}, which are not split in 4 bits, but the launch splits the model with {way}; launch it on one "
            "GPU, or with `--accelerate_config ddp`."
        )


def with_experts_in_4_bits(recipe: Recipe, model: Any, peft_config: PeftConfig | None) -> tuple[Any, PeftConfig | None]:
    """What a trainer is given in the place of `model` and `peft_config` where `recipe` wants experts in 4 bits.

    That is a model with new adapters, and no configuration of some: all but them, embedding, head, norms and routers is
    in 4 bits. Else it is what is given.

    Raises:
        RecipeError: for a `chat_template_path`, as TRL trains the tokens that it adds with adapters of its own making.
    """
    from transformers import AutoConfig

    if not isinstance(model, str) or peft_config is None or not recipe.model.load_in_4bit:
        return model, peft_config
    trusted = recipe.get("trust_remote_code")
    config = AutoConfig.from_pretrained(model, revision=recipe.model.model_revision, trust_remote_code=trusted)
    if not count_experts(config):
        return model, peft_config
    if (template := getattr(recipe.training, "chat_template_path", None)) is not None:
        raise RecipeError(
            f"{recipe.source}: `chat_template_path` is {template!r}, but tokens that it adds would not be trained with "
            "experts in 4 bits; leave it out for the tokenizer's own template."
        )
    kwargs = {**model_kwargs(recipe), **(getattr(recipe.training, "model_init_kwargs", None) or {})}
    loading = {**kwargs, "trust_remote_code": trusted, "device_map": {"": "cpu"}}
    return _adapted(recipe, model_class(config).from_pretrained(model, **loading), peft_config), None


def _adapted(recipe: Recipe, model: Any, peft_config: PeftConfig) -> Any:
    from peft import get_peft_model

    from liger_trainer.patching.moe.quantized_experts import quantize_experts, stacked_weights

    adapted, device = get_peft_model(model, peft_config), recipe.training.device
    if any(stacked_weights(adapted)):  # those in lists of linear layers are in 4 bits
        quantize_experts(adapted, recipe.model.bnb_4bit_quant_type, recipe.model.use_bnb_nested_quant, device)
    # accelerate asks here where a quantised model is.
    model.hf_device_map = {"": device}
    return adapted.to(device)


def check_adapted_experts(recipe: Recipe, model: Any) -> None:
    """Checks that adapters on experts in 4 bits run in our operator, as PEFT's own forward is wrong for such weights.

    Raises:
        RecipeError: if they do not.
    """
    from liger_trainer.patching.moe.lora_experts import adapted_experts_left_to_peft
    from liger_trainer.patching.probe import class_of

    left = adapted_experts_left_to_peft(model)
    if left is not None:
        raise RecipeError(
            f"{recipe.source}: the adapters on {class_of(left).__name__} in 4 bits run in our operator alone, which is "
            "switched off or not proved for them (`kernel_report: true` says which). Leave `use_liger_kernel` and "
            "`liger_kernel_config` as they are, or set `load_in_4bit: false`."
        )
