"""A base that stays packed (`packed_base`): when a trainer loads it so, and what it cannot do with it.

Packed weights are frozen codes. What would read or change a floating weight is refused before it fails, or is wrong, in
a step: adapters that need it, merging, training it, and splitting the model in another way than FSDP2, which gathers
the codes of a layer whole before it runs.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

from accelerate.utils import parse_flag_from_env
from torch import nn

from liger_trainer.compat.private import is_at_least
from liger_trainer.configs.flags import packed_base_of
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.packed.loading import check_trained, is_packed, method_of, packed_loading, packed_modules
from liger_trainer.patching.lora.guards import refuse_what_reads_weights
from liger_trainer.trainers.checks.low_bit import splits_weights

_LOADS_CODES = "5.21"  # of transformers: older ones lack names that the loading needs (`compat/transformers.py`)
_SPLITS_CODES = "2.12"  # of torch: the FSDP2 of older ones takes no weights that are whole numbers
_FROM_WEIGHTS = ("pissa", "corda", "olora", "loftq", "lora_ga", "mica")  # initialisations that read the base's weights


def keeps_packed(args: Any, adapted: bool) -> bool:
    """Whether a trainer with these arguments keeps a packed checkpoint packed; `adapted`: with adapters on it.

    By default it does not where it could not train it so: the launch splits the model in another way than FSDP2, vLLM
    gets merged adapters, or transformers is older than 5.21.
    """
    wanted = packed_base_of(args)
    if wanted is not None:
        return wanted
    split = _fsdp_version(args)
    against = [parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"), split is not None and not (split == 2 and _may_split())]
    against += [getattr(args, name, None) for name in ("deepspeed", "use_vllm")]
    return adapted and not any(against) and is_at_least("transformers", _LOADS_CODES)


def _may_split() -> bool:
    """Whether FSDP2 can split codes."""
    return is_at_least("torch", _SPLITS_CODES)


def _fsdp_version(args: Any) -> int | None:
    """The version of FSDP that splits the model of a trainer with these arguments; None if none does."""
    if options := getattr(args, "fsdp_plugin_args", None):
        return int(options.get("fsdp_version", 1))
    return int(os.environ.get("FSDP_VERSION", "1")) if parse_flag_from_env("ACCELERATE_USE_FSDP") else None


def loading(args: Any, model: Any, peft_config: Any) -> contextlib.AbstractContextManager[None]:
    """The context in which a trainer with these arguments loads its `model`, which may be a name.

    Raises:
        ValueError: If `packed_base` is true without adapters or with a `quantization_config`, and for adapters that
            read the weights of a base that stays packed, or copies of its modules that are trained.
    """
    asked, options = packed_base_of(args), getattr(args, "model_init_kwargs", None) or {}
    trained = getattr(peft_config, "modules_to_save", None) or ()
    if isinstance(model, nn.Module) and is_packed(model):
        _refuse_readers(peft_config, "`model`")
        check_trained(trained, packed_modules(model))
    if not isinstance(model, str) or not keeps_packed(args, peft_config is not None):
        return contextlib.nullcontext()
    if peft_config is None:
        raise ValueError(
            "`packed_base` is true, but there are no adapters, and a packed base is frozen. Give a `peft_config` "
            "(`use_peft`), or load the model dequantised."
        )
    if "quantization_config" in options:
        if asked:
            raise ValueError("`packed_base` is true, but `quantization_config` is given; leave one of them out.")
        return contextlib.nullcontext()
    if _reads_weights(peft_config):
        from transformers import AutoConfig

        named = {key: options[key] for key in ("revision", "trust_remote_code") if key in options}
        if method_of(AutoConfig.from_pretrained(model, **named)) is not None:
            _refuse_readers(peft_config, repr(model))
    return packed_loading(trained)


def _refuse_readers(peft_config: Any, model: str) -> None:
    """Refuses adapters that read the weights of a packed base."""
    if needs := _reads_weights(peft_config):
        raise ValueError(
            f"{needs} needs the floating weights of {model}, which stay packed. Use plain LoRA, or set `packed_base` "
            "to false."
        )


def _reads_weights(peft_config: Any) -> str:
    """What of a configuration of adapters reads the base's weights; empty if nothing does, as far as it says."""
    way = str(getattr(peft_config, "init_lora_weights", True)).lower()
    if getattr(peft_config, "use_dora", False):
        return "DoRA (`use_dora`)"
    return f"`init_lora_weights={way!r}`" if way.startswith(_FROM_WEIGHTS) else ""


def check_packed_base(trainer: Any) -> None:
    """Checks that the model is packed if that is asked for, and that the launch and the trainer can have it so."""
    model, wanted = trainer.model, packed_base_of(trainer.args)
    if not is_packed(model):
        if wanted:
            raise ValueError(
                f"`packed_base` is true, but {type(without_adapters(model)).__name__} holds no packed weights. Give "
                "the trainer the name of a checkpoint in FP8, MXFP4, MXFP8, NVFP4 or INT4, or a model that "
                "`load_packed` has loaded; or set it to false."
            )
        return
    way, plugin = splits_weights(trainer, model), getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if way == "FSDP" and plugin is not None and plugin.fsdp_version == 1:
        way = "FSDP1 (`fsdp_version: 1`)"
    elif way == "FSDP" and not _may_split():
        way = f"the FSDP2 of a torch older than {_SPLITS_CODES}"
    if way not in (None, "FSDP"):
        raise ValueError(
            f"`model` has packed weights, and {way} splits it, which takes no codes. Launch it on one GPU, with "
            f"`--accelerate_config ddp` or, from torch {_SPLITS_CODES} on, `fsdp2`; or set `packed_base` to false."
        )
    if getattr(trainer.args, "use_vllm", False):
        raise ValueError(
            "`use_vllm` is true: vLLM gets the adapters merged into their base, and `model` has packed weights. Set "
            "`use_vllm` or `packed_base` to false."
        )
    refuse_what_reads_weights(model)
