"""What a trainer refuses, or mends, of a model whose weights are in 8 bits and fewer, whatever their format.

Before the first step: what is trained must not be codes or add to them, and must not have started in their dtype. After
the first backward: gradients must have passed the layers that only a library knows how to multiply.

A base that the trainer itself stores in fp8 (`fp8_base`) is converted here too; one that was published in fp8 and stays
packed multiplies as it is.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.peft import TUNER_LAYERS
from liger_trainer.compat.private import available
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.kernels.fp8.linear import has_fp8
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.packed.loading import is_packed, method_of, quantization_of
from liger_trainer.packed.modelopt import FILE
from liger_trainer.patching.codes import adds_to_codes, is_code, own_tensors, stored, unscaled_weights
from liger_trainer.patching.lora.fp8_base import store_base_in_fp8
from liger_trainer.patching.moe.lora_experts import is_param_wrapper
from liger_trainer.patching.report import KernelReportRow
from liger_trainer.trainers.checks.first_step import CURE, uncut_gradients

logger = logging.getLogger("liger_trainer")

_REDRAWN = (True, "gaussian")  # initialisations that read nothing of the base
_OF_LINEARS = "weight"  # the name of a linear layer's weight
_CHECKED = "_first_gradients_checked"  # an attribute of a trainer


def check_scales(model: Any) -> None:
    """Checks that no weight of `model` holds codes as if they were numbers; see [`unscaled_weights`]."""
    names = unscaled_weights(model)
    if names:
        config = getattr(model, "config", None)
        settings = quantization_of(config) or {}
        method = (settings if isinstance(settings, dict) else vars(settings)).get("quant_method")
        cause = f" transformers does not know the `quant_method` {method!r} of its configuration." if method else ""
        way = (
            "Load a checkpoint in 16 bits, or in a format that transformers reads; one of ModelOpt from a folder that "
            f"holds its {FILE} too (`hf download`)."
        )
        if method_of(config) is not None:
            way = "With adapters on it `packed_base: auto` reads it, and so does `load_packed`; or load one in 16 bits."
        raise ValueError(
            f"{len(names)} weights of `model`, such as {names[0]!r}, hold the codes of a quantised checkpoint, whose "
            f"scales were not loaded.{cause} {way}"
        )


def check_low_bit_weights(model: nn.Module) -> None:
    """Checks that what `model` trains is not in codes, nor reads codes as if they were weights.

    Adapters that were just initialised in 8 bits, as PEFT does on a base in fp8, are initialised again in their own
    dtype, and it is said once.
    """
    check_scales(model)
    name = next((name for name, each in model.named_parameters() if each.requires_grad and is_code(each)), None)
    if name is not None:
        raise ValueError(
            f"`model` trains {name!r}, which is in {model.get_parameter(name).dtype} and cannot take small steps. Keep "
            f"adapters in fp32 (`autocast_adapter_dtype=True`), or train more than the codes of a base. {CURE}"
        )
    redrawn = [name for name, layer in _tuner_layers(model) if _check_adapted(name, layer, model)]
    if redrawn:
        logger.warning(
            "PEFT had initialised the adapters of %d layers, such as %r, in the 8 bits of their base, which leaves a "
            "few distinct values. They have been initialised again in their own dtype.",
            len(redrawn),
            redrawn[0],
        )
    _check_all_were_adapted(model)


def _tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    if hasattr(model, "peft_config") and available(TUNER_LAYERS):
        from peft.tuners.tuners_utils import BaseTunerLayer

        yield from ((name, each) for name, each in model.named_modules() if isinstance(each, BaseTunerLayer))


def _check_adapted(name: str, layer: Any, model: Any) -> bool:
    """Refuses adapters that read codes; whether the adapters of `layer` were initialised again."""
    if is_param_wrapper(layer):
        reason = adds_to_codes(layer)
        if reason:
            raise ValueError(f"The adapter on {name!r} cannot be trained: {reason}. {CURE}")
        return False
    weight = stored(layer.get_base_layer(), "weight")
    if weight is None or not is_code(weight):
        return False
    for adapter in getattr(layer, "lora_magnitude_vector", ()):
        raise ValueError(
            f"The adapter {adapter!r} on {name!r} uses DoRA, whose magnitudes are norms of the weight, and that holds "
            f"codes ({weight.dtype}). Use plain LoRA. {CURE}"
        )
    redrawn = False
    for adapter in layer.active_adapters:
        if _was_rounded(layer, adapter, weight.dtype):
            way = model.peft_config[adapter].init_lora_weights
            if way not in _REDRAWN:
                raise ValueError(
                    f"`init_lora_weights` is {way!r}, and the adapter on {name!r} was rounded to {weight.dtype} when "
                    f"it was made. Use True or 'gaussian'. {CURE}"
                )
            layer.reset_lora_parameters(adapter, way)
            redrawn = True
    return redrawn


def _was_rounded(layer: Any, adapter: str, dtype: torch.dtype) -> bool:
    """Whether an adapter on a base of `dtype` is as it was initialised, and its random half has only such values."""
    if not dtype.is_floating_point:
        return False
    if adapter in getattr(layer, "lora_A", {}):
        drawn, zeros = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    elif adapter in getattr(layer, "lora_embedding_A", {}):
        drawn, zeros = layer.lora_embedding_B[adapter], layer.lora_embedding_A[adapter]
    else:
        return False
    if drawn.is_meta or is_dtensor(drawn) or not drawn.numel() or zeros.any() or not drawn.any():
        return False
    return bool((drawn.detach().to(dtype).to(drawn.dtype) == drawn).all())


def _check_all_were_adapted(model: Any) -> None:
    """Checks that PEFT has found the weights that `target_parameters` names: it skips those that are packed."""
    modules = {path.replace(".base_layer", ""): module for path, module in model.named_modules()}
    wrapped = {
        f"{path.replace('.base_layer', '')}.{module.parameter_name}"
        for path, module in model.named_modules()
        if is_param_wrapper(module)
    }
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        for target in getattr(config, "target_parameters", None) or ():
            owner, _, leaf = target.rpartition(".")
            for path, module in modules.items():
                meant = not owner or f".{path}".endswith(f".{owner}")
                if not meant or f"{path}.{leaf}" in wrapped or not _is_packed(module, leaf):
                    continue
                cure = CURE
                if leaf == _OF_LINEARS:
                    cure = f"Name the layer in `target_modules` (`lora_target_modules`): {path.rpartition('.')[2]!r}."
                raise ValueError(
                    f"The adapter {adapter!r} names {target!r} in `target_parameters`, but {path!r} keeps it packed: "
                    f"PEFT has made no adapter for it. {cure}"
                )


def _is_packed(module: nn.Module, name: str) -> bool:
    """Whether `module` keeps the weight `name` as codes of another name, or as an object of a library's own."""
    tensors = own_tensors(module)
    if name in tensors:
        return is_code(tensors[name])
    # Layers call their codes as they like: `codes`, `qweight`.
    if any(is_code(each) for own, each in tensors.items() if name == _OF_LINEARS or own.startswith(f"{name}_")):
        return True
    return name in vars(module) and vars(module)[name] is not None


def first_step_checked(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """[`first_gradients_checked`] around the first forward and backward of `trainer`; nothing around the others."""
    if vars(trainer).get(_CHECKED, False):
        return contextlib.nullcontext()
    vars(trainer)[_CHECKED] = True
    # ZeRO keeps gradients elsewhere, and FSDP1 leaves some processes without a part of a small parameter.
    whole = not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
    whole = whole or any(map(is_dtensor, trainer.model.parameters()))
    return first_gradients_checked(trainer.model) if whole else contextlib.nullcontext()


@contextlib.contextmanager
def first_gradients_checked(model: nn.Module) -> Iterator[None]:
    """Checks, after the first forward and backward in the context, that gradients reached what is trained.

    Warns, once, of trained parameters that have none, with all that are called alike in other layers.

    Raises:
        ValueError: for a layer that cuts a gradient, and for adapters on codes none of which has one.
    """
    with uncut_gradients(model):
        yield
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    without = [name for name, each in trained if each.grad is None]
    if not without or len(without) == len(trained):  # an optimizer may have taken all of them during the backward
        return
    reached = {_kind(name) for name, each in trained if each.grad is not None}
    idle = [name for name in without if _kind(name) not in reached]
    if not idle:  # experts without a token
        return
    _check_adapters_on_codes(model)
    logger.warning(
        "%d of %d trained parameters, such as %r, got no gradient in the first step: they are not trained unless a "
        "later batch reaches them.",
        len(idle),
        len(trained),
        idle[0],
    )


def _kind(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _check_adapters_on_codes(model: nn.Module) -> None:
    """Raises ValueError if no adapter on one kind of coded layer has a gradient."""
    by_kind: dict[type, list[tuple[str, bool]]] = {}
    for path, layer in _tuner_layers(model):
        base = layer.get_base_layer()
        if any(map(is_code, own_tensors(base).values())):
            own = [each for name, each in layer.named_parameters() if each.requires_grad]
            by_kind.setdefault(type(base), []).append((path, any(each.grad is not None for each in own)))
    for kind, layers in by_kind.items():
        if not any(reached for _, reached in layers):
            raise ValueError(
                f"None of the {len(layers)} adapters on layers of {kind.__name__}, such as {layers[0][0]!r}, got a "
                f"gradient: these layers hold codes, and their forward does not use the adapters. {CURE}"
            )


def store_base(trainer: Any, model: nn.Module) -> tuple[KernelReportRow, ...]:
    """Stores the base of `model` in fp8 on the trainer's device; see `store_base_in_fp8`.

    Raises:
        ValueError: If that cannot be: without LoRA adapters, with a quantised base that is not packed, where the launch
            splits the model, with vLLM, or on a device without matmuls in fp8.
    """
    given, device = "`fp8_base` is true, but", trainer.args.device
    if not has_fp8(device) and not is_packed(model):
        raise ValueError(
            f"{given} {device.type} has no fp8 matmuls with a scale for each row, which NVIDIA's Hopper and newer "
            "have. Set it to false; `load_in_4bit` needs even less memory."
        )
    _check_model(given, model)
    _check_launch(given, trainer, model)
    return store_base_in_fp8(model, device)


def _check_model(given: str, model: Any) -> None:
    kinds = {str(getattr(one.peft_type, "value", one.peft_type)) for one in getattr(model, "peft_config", {}).values()}
    if kinds != {"LORA"}:
        has = f"adapters of the kind {', '.join(sorted(kinds))}" if kinds else "no adapters, and trains its weights"
        raise ValueError(f"{given} the model has {has}. Give it LoRA adapters (`peft_config`, `use_peft`).")
    base: Any = without_adapters(model)
    if getattr(base, "is_quantized", False) and not is_packed(model):
        raise ValueError(
            f"{given} the model is quantised already (`load_in_4bit`, `quantization_config`), and not a checkpoint in "
            "fp8 that stays packed. Leave one of them out."
        )


def splits_weights(trainer: Any, model: Any) -> str | None:
    """What of the launch splits the weights of `model`; None if each process has them whole."""
    split = trainer.get_tp_size() > 1 or (getattr(without_adapters(model), "tp_size", None) or 1) > 1
    ways = {
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "`distributed_config`": trainer.is_distributed_loading_by_transformers,
        "tensor parallelism": split,
    }
    return next((way for way, used in ways.items() if used), None)


def _check_launch(given: str, trainer: Any, model: Any) -> None:
    way = splits_weights(trainer, model)
    if way is not None:
        raise ValueError(
            f"{given} {way} splits the model, which weights in fp8 do not support. Launch it on one GPU, or with "
            "`--accelerate_config ddp`."
        )
    if getattr(trainer.args, "use_vllm", False):
        raise ValueError(
            f"{given} vLLM gets the adapters merged into their base (`use_vllm`), which is not possible in fp8. Set "
            "one of the two to false."
        )
