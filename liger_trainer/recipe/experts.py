"""Experts of a recipe's model: split over processes (``expert_parallel_size``), or in 4 bits (``load_in_4bit``).

In 4 bits, transformers loads the model into host memory with 4-bit linear layers and unquantised experts; adapters are
added; then the experts move to the device one weight at a time, in 4 bits, so the device never holds them in 16 bits.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from liger_trainer.recipe.file import RecipeError
from liger_trainer.recipe.load import Recipe

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig

TRAINERS = ("sft", "causal_lm")
"""Trainers that accept a model with adapters. Others would add a second adapter as the reference, for which PEFT does
not find 4-bit weights, or have not been tried."""


def count_experts(config: PreTrainedConfig) -> int:
    """Routed experts per layer of a model of `config`; 0 for a dense model."""
    names, text = ("num_experts", "num_local_experts", "n_routed_experts"), config.get_text_config()
    return next((count for count in (getattr(text, name, None) for name in names) if count), 0)


def can_split_experts(config: PreTrainedConfig) -> bool:
    """Whether transformers can send tokens to experts on other processes, in a model of `config`."""
    plan = getattr(config.get_text_config(), "base_model_ep_plan", None) or {}
    return "ep_dispatch_experts" in plan.values()


def check_expert_parallel(recipe: Recipe, config: PreTrainedConfig) -> None:
    """Checks that this launch can split the experts of `config` over `expert_parallel_size` processes."""
    size = recipe.recipe.expert_parallel_size
    check_expert_count(recipe.source, size, config)
    if (way := splits_of_launch()) is not None:
        raise RecipeError(
            f"{recipe.source}: `expert_parallel_size` is {size}, which splits the whole model, but the launch splits "
            f"it with {way}; launch it with `--accelerate_config ddp`, or set `expert_parallel_size: 1`."
        )
    expert_parallel_config(recipe)


def check_expert_count(source: Path, size: int, config: PreTrainedConfig) -> None:
    """Checks that `size` processes can share the experts of a model of `config`."""
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


def expert_parallel_config(recipe: Recipe) -> dict[str, int]:
    """The ``distributed_config`` with which `from_pretrained` splits the model over the processes of this launch."""
    size, processes = recipe.recipe.expert_parallel_size, int(os.environ.get("WORLD_SIZE", "1"))
    if processes % size:
        raise RecipeError(
            f"{recipe.source}: `expert_parallel_size` is {size}, but the number of processes is {processes}; launch a "
            f"multiple of {size}: `liger-trainer train RECIPE --accelerate_config ddp --num_processes {size}`."
        )
    return {"fsdp_size": processes, "ep_size": size}


def splits_of_launch() -> str | None:
    """The library that splits the model in this launch; None if none does."""
    from accelerate.utils import parse_flag_from_env

    ways = {"ACCELERATE_USE_FSDP": "FSDP", "ACCELERATE_USE_DEEPSPEED": "DeepSpeed"}
    return next((way for flag, way in ways.items() if parse_flag_from_env(flag)), None)


def check_loading_in_4_bits(source: Path, trainer: str, config: PreTrainedConfig) -> None:
    """Checks that ``load_in_4bit`` can quantise the experts of a model of `config`, if it has any."""
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
            f"{given}, which cannot be split in 4 bits, but the launch splits the model with {way}; launch it on one "
            "GPU, or with `--accelerate_config ddp`."
        )


def adapted_in_4_bits(recipe: Recipe, model: Any, peft_config: PeftConfig) -> Any:
    """Adds adapters to a model in host memory, and moves it to the device with its experts in 4 bits.

    Adapters, embedding, LM head, norms and routers are not quantised.
    """
    from peft import get_peft_model

    from liger_trainer.patching.moe.quantized_experts import quantize_experts, stacked_weights

    adapted, device = get_peft_model(model, peft_config), recipe.training.device
    if any(stacked_weights(adapted)):  # experts that are lists of linear layers are in 4 bits already
        quantize_experts(adapted, recipe.model.bnb_4bit_quant_type, recipe.model.use_bnb_nested_quant, device)
    model.hf_device_map = {"": device}  # where accelerate looks for the device of a quantised model
    return adapted.to(device)
