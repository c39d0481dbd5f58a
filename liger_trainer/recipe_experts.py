"""A mixture of experts in 4 bits, of a recipe with `load_in_4bit`.

transformers loads the model into the host's memory, with its linear layers in 4 bits and its experts as they are;
adapters are made; and the experts go to the device weight by weight, in 4 bits. So the device never holds them in 16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe import Recipe
from liger_trainer.recipe_file import RecipeError
from liger_trainer.recipe_model import count_experts, model_class, model_kwargs

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig

TRAINERS = ("sft", "causal_lm")
"""Those that are given a model with adapters as it is. Others would make a second adapter of it as the reference, for
which PEFT finds no weights in 4 bits, or are not tried."""


def check_experts_in_4_bits(source: Path, trainer: str, config: PreTrainedConfig) -> None:
    """Checks that a recipe with `load_in_4bit` can quantise the experts of a model of `config`, if it has any.

    Raises:
        RecipeError: if it cannot.
    """
    from accelerate.utils import parse_flag_from_env

    if not count_experts(config):
        return
    given = f"{source}: `load_in_4bit` is true and the model ({config.get_text_config().model_type}) has experts"
    if trainer not in TRAINERS:
        raise RecipeError(
            f"{given}, which train in 4 bits with `trainer` {' and '.join(TRAINERS)}, not with {trainer}; set "
            "`load_in_4bit: false`."
        )
    for flag, way in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")):
        if parse_flag_from_env(flag):
            raise RecipeError(
                f"{given}, which are not split in 4 bits, but the launch splits the model with {way}; launch it on one "
                "GPU, or with `--accelerate_config ddp`."
            )


def quantises_experts(recipe: Recipe, name: str) -> bool:
    """Whether the model in `name` has experts and `recipe` wants 4 bits."""
    from transformers import AutoConfig

    if not recipe.model.load_in_4bit:
        return False
    revision, trusted = recipe.model.model_revision, recipe.get("trust_remote_code")
    return count_experts(AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trusted)) > 0


def load_in_4_bits(recipe: Recipe, name: str, peft_config: PeftConfig) -> Any:
    """The model in `name` with new adapters, all but them, embedding, head, norms and routers in 4 bits.

    Raises:
        RecipeError: for a `chat_template_path`, whose new tokens TRL trains of adapters that it makes itself.
    """
    from peft import get_peft_model
    from transformers import AutoConfig

    from liger_trainer.quantized_experts import quantize_experts, stacked_weights

    if getattr(recipe.training, "chat_template_path", None):
        raise RecipeError(
            f"{recipe.source}: `chat_template_path` is {recipe.training.chat_template_path!r}, but tokens that it adds "  # type: ignore[attr-defined]
            "would not be trained with experts in 4 bits; leave it out for the tokenizer's own template."
        )
    revision, trusted = recipe.model.model_revision, recipe.get("trust_remote_code")
    more = getattr(recipe.training, "model_init_kwargs", None) or {}
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trusted)
    model = model_class(config).from_pretrained(
        name, trust_remote_code=trusted, **{**model_kwargs(recipe), **more, "device_map": {"": "cpu"}}
    )
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
    from liger_trainer.patching.lora_experts import adapted_experts_left_to_peft
    from liger_trainer.patching.probe import class_of

    left = adapted_experts_left_to_peft(model)
    if left is not None:
        raise RecipeError(
            f"{recipe.source}: the adapters on {class_of(left).__name__} in 4 bits run in our operator alone, which is "
            "switched off or not proved for them (`kernel_report: true` says which). Leave `use_liger_kernel` and "
            "`liger_kernel_config` as they are, or set `load_in_4bit: false`."
        )
