"""Adapters that FSDP1 would train but not save, and adapters that FSDP2 cannot load.

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
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import nn

from liger_trainer.compat.accelerate import FSDP_PLUGIN
from liger_trainer.compat.private import require
from liger_trainer.compat.torch import FSDP1_UNITS

logger = logging.getLogger("liger_trainer")

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
