"""What a trainer refuses when it is built, or warns of: its launch, its checkpoints, adapters with FSDP, a tied head.

Since 0.21, PEFT finds adapters by the names of their layers, from which it removes FSDP's prefix only at the beginning.
Inside FSDP1's nested units the names do not match the state dict's, so checkpoints and `save_model` silently lack those
adapters.

For FSDP2, accelerate moves the model to the meta device and ties its weights again. If PEFT has wrapped the tied head,
that fails in transformers with a KeyError or an AttributeError that names no cause. Copies and trained rows share
weights with the embedding without accelerate's knowledge.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from liger_trainer.compat.accelerate import FSDP_PLUGIN
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import FSDP1_UNITS
from liger_trainer.configs.liger_adamw import LIGER_ADAMW
from liger_trainer.head.lm_head import adapts_tied_weight
from liger_trainer.patching.recurrent.find import is_mixer
from liger_trainer.stock_trainer import data_parallel_message

logger = logging.getLogger("liger_trainer")


def check_launch(trainer: Any, takes_parts_of_sequences: bool) -> None:
    """Checks, after the construction of the Hugging Face trainer, that the launch suits it.

    Raises:
        ValueError: for several GPUs in one process, for context or sequence parallelism where the loss or a layer needs
            whole sequences, and for a model that `from_pretrained` has split and the launch would split again.
    """
    name = type(trainer).__name__
    if trainer.args.n_gpu > 1:
        raise ValueError(data_parallel_message(name))
    sizes = {"cp_size": trainer.get_cp_size(), "sp_size": trainer.get_sp_size()}
    ranks = trainer._ranks
    for option, size in (sizes if ranks is None else {ranks.option: ranks.ranks}).items():
        if size > 1 and not takes_parts_of_sequences:
            raise ValueError(
                f"`parallelism_config` has `{option}={size}`, which gives every process a part of each sequence; the "
                f"loss of {name} needs whole ones. Set `{option}=1` and split the model with FSDP2 or tensor "
                "parallelism, or train with LigerTrainer or LigerSFTTrainer."
            )
        mixer = next(filter(is_mixer, trainer.model.modules()), None) if size > 1 else None
        if mixer is not None:
            raise ValueError(
                f"`parallelism_config` has `{option}={size}`, which gives every process a part of each sequence; "
                f"{type(mixer).__name__} has a state that goes on from part to part. Set `{option}=1` and split the "
                "model with FSDP2."
            )
    if trainer.is_distributed_loading_by_transformers and (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled):
        again = "FSDP" if trainer.is_fsdp_enabled else "DeepSpeed"
        raise ValueError(
            "`model` was split by `from_pretrained` (`distributed_config`), and the launch would split it again with "
            f"{again}. Launch it with `torchrun`, or `accelerate launch` with `--accelerate_config ddp`; "
            "`DistributedConfig(fsdp_size=...)` is FSDP2."
        )


def check_saves_on_each_host(trainer: Any) -> None:
    """Refuses checkpoints on a disk of each host, where the hosts hold one model together; none could be resumed."""
    args = trainer.args
    split = trainer.is_fsdp_enabled or trainer.is_distributed_loading_by_transformers
    alone = args.world_size <= int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
    if split and not alone and args.save_on_each_node and args.save_strategy != "no":
        raise ValueError(
            "`save_on_each_node` is true, but the hosts hold the model together, and no host would save all of it. Set "
            "`save_on_each_node: false` and an `output_dir` that all hosts share, or train with DDP."
        )


def check_masks_of_ulysses(trainer: Any) -> None:
    """Refuses what DeepSpeed's Ulysses would train without its masks, after the kernels are applied.

    Raises:
        ValueError: for windows and documents where attention is SDPA, which finds neither.
    """
    size = trainer.get_sp_size()
    if size == 1 or trainer._exchanges_heads:
        return
    handler = getattr(trainer.accelerator.parallelism_config, "sp_handler", None)
    if getattr(handler, "sp_attn_implementation", None) != "sdpa":
        return
    config = trainer.model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["sliding" if getattr(config, "sliding_window", None) else "full"]
    lost = [kind for kind in kinds if "sliding" in kind or "chunked" in kind]
    packs = getattr(trainer.args, "packing_strategy", None) != "wrapped"  # whose documents see each other
    lost += [f"`{name}`" for name in ("packing", "padding_free") if packs and getattr(trainer.args, name, None)]
    if lost:
        raise ValueError(
            f"`sp_size` is {size} with `sp_attn_implementation='sdpa'`, which gets no masks from DeepSpeed: with "
            f"{lost[0]}, tokens would see all before them. Set `sp_attn_implementation` to a flash attention, or "
            "`sp_size=1`."
        )


def warn_of_fp32_weights(trainer: Any) -> None:
    """Warns if accelerate's FSDP is going to make the bf16 weights fp32 that `liger_adamw` was to train."""
    precision = trainer.accelerator.mixed_precision
    if trainer.args.optim != LIGER_ADAMW or not trainer.is_fsdp_enabled or precision == "no":
        return
    if trainer.is_world_process_zero() and any(
        weight.requires_grad and weight.dtype == torch.bfloat16 for weight in trainer.model.parameters()
    ):
        logger.warning(
            "Mixed precision is on (%s), so FSDP trains fp32 weights, 16 bytes a parameter, as with `optim: "
            "adamw_torch_fused`. For `liger_adamw` to train bf16 weights, 8 bytes a parameter, set `bf16: false`; in a "
            "script of your own, also launch it with `accelerate launch --mixed_precision no`.",
            precision,
        )


def warn_of_tied_adapters(model: nn.Module) -> None:
    """Warns if an adapter is on the head or on the embedding of a model that ties the two.

    Training is right. But PEFT's merge adds the adapter to the weight that both use, and adds it twice if
    `ensure_weight_tying` has put it on both.
    """
    if adapts_tied_weight(model):
        logger.warning(
            "The LM head is tied to the embedding, and an adapter is on one of them or both. Training is right, but "
            "PEFT's `merge_and_unload()` would change both, since they share a weight (with `ensure_weight_tying` "
            "even twice), so the merged model would compute other logits. Merge with `liger-trainer merge`, or untie "
            "the head before you merge: `head = model.get_output_embeddings(); "
            "head = getattr(head, 'token_adapter', head); head = getattr(head, 'base_layer', head); "
            "head.weight = torch.nn.Parameter(head.weight.detach().clone())`."
        )


require(FSDP_PLUGIN)
(_WRAPPED,) = require(FSDP1_UNITS)


def check_fsdp1_adapters(trainer: Any) -> None:
    """Refuses a run whose checkpoints would lack its adapters; warns if none are to be written."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 1 or not is_peft_model(trainer.model):
        return
    if any(getattr(config, "use_dora", False) for config in trainer.model.peft_config.values()):
        raise ValueError(
            "`use_dora` does not work with FSDP1, which makes each trained matrix a unit: DoRA reads them outside of "
            "their units. Use FSDP2 (`fsdp_version: 2`, `--accelerate_config fsdp2`), DDP or ZeRO."
        )
    if _are_found_in_units():
        return
    import peft

    message = (
        f"PEFT {peft.__version__} saves and loads no adapter inside a unit of FSDP1, so that checkpoints and the saved "
        "model would lack them. Use FSDP2 (`fsdp_version: 2`, `--accelerate_config fsdp2`)"
    )
    if trainer.args.save_strategy != "no":
        raise ValueError(f"{message}, or DDP; or set `save_strategy='no'` to train without saving.")
    logger.warning("%s for a model that is to be saved.", message)


def check_fsdp2_tied_head(trainer: Any) -> None:
    """Refuses a model whose tied head PEFT has wrapped, if accelerate could not load it under FSDP2."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is None or plugin.fsdp_version != 2 or not is_peft_model(trainer.model):
        return
    model = trainer.model.get_base_model()
    for name in getattr(model, "all_tied_weights_keys", None) or {}:
        module = model.get_submodule(name.rpartition(".")[0])
        if not type(module).__module__.startswith("peft."):
            continue
        wrapped = f"`{name}` is tied to the embedding, and PEFT has put its {type(module).__name__} around it: "
        if not hasattr(module, "lora_A"):
            raise ValueError(
                f"{wrapped}accelerate puts the two into units of their own under FSDP2, which may share no weight. Use "
                "DDP or ZeRO, or train adapters of the layers alone."
            )
        if plugin.cpu_ram_efficient_loading:
            raise ValueError(
                f"{wrapped}accelerate cannot tie them again when it loads the model under FSDP2. Set "
                "`fsdp_cpu_ram_efficient_loading: false` (`--fsdp_cpu_ram_efficient_loading false` of `accelerate "
                "launch`), or use DDP or ZeRO."
            )


@functools.cache
def _are_found_in_units() -> bool:
    """Whether the installed PEFT finds the adapter of a layer that is inside a nested unit of FSDP1."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    with torch.random.fork_rng(devices=[]):  # initialising the weights must not change the run's random numbers
        unit = nn.Module()
        unit.add_module(_WRAPPED, nn.ModuleDict({"linear": nn.Linear(2, 2)}))
        model: Any = get_peft_model(nn.ModuleDict({"unit": unit}), LoraConfig(r=1, target_modules=["linear"]))
    whole = {name.replace(f"{_WRAPPED}.", ""): tensor for name, tensor in model.state_dict().items()}
    return bool(get_peft_model_state_dict(model, state_dict=whole))
