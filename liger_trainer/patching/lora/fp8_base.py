"""Stores the frozen linear layers of a decoder under LoRA adapters in fp8 (`fp8_base`).

All decoder layers are stored so, the first and the last too: linear layers with LoRA adapters, and frozen ones without
that have at least 1,024 input and output features. Smaller ones, such as routers, stay, as do the head, embeddings and
vision towers.

A layer of PEFT's is changed in place: its `base_layer` becomes an `Fp8Linear`. What PEFT could do with its weight is
refused: merging, adapters that read it (DoRA), and saving the whole model.

Of a checkpoint that stays packed (`packed_base`), nothing is cast: those of its linear layers that were published in
fp8, with a scale a row or for blocks of 128 x 128, multiply in fp8 with their codes and scales. The others stay decoded
for their products, as stacked experts do, and what was published in 16 bits stays so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from liger_trainer.compat.hooks import is_call_hooked
from liger_trainer.compat.peft import ADAPTERS_ON_FP8
from liger_trainer.compat.private import require
from liger_trainer.head.lm_head import without_adapters
from liger_trainer.head.warn_once import warn_once
from liger_trainer.kernels.fp8.linear import MULTIPLE
from liger_trainer.kernels.runtime import is_dtensor
from liger_trainer.packed.experts import packed_stacks
from liger_trainer.packed.loading import is_packed
from liger_trainer.packed.modules import PackedLinear
from liger_trainer.patching.binding import overriding_forward
from liger_trainer.patching.fp8 import LEAST_FEATURES, decoder_layers
from liger_trainer.patching.lora.low_bit import Fp8Linear
from liger_trainer.patching.lora.operands import is_lora_linear
from liger_trainer.patching.report import Finding, KernelReportRow, rows

_KERNEL, _PUBLISHED = "fp8 (e4m3), a scale for each row", "fp8 (e4m3), as it was published"
_IN_16_BITS = "it was published in 16 bits"


def store_base_in_fp8(model: nn.Module, device: torch.device) -> tuple[KernelReportRow, ...]:
    """Stores the frozen linear layers of `model`'s decoder in fp8, one by one, in place.

    Each weight is freed once its codes exist, unless something outside of the model refers to it. Layers that are
    stored in fp8 already only appear in the report. Packed ones are not changed, but multiply in fp8 from now on; if
    none can, that is a warning, since the base is in few bits in any case.

    Args:
        model: A model of PEFT's with LoRA adapters.
        device: Where the weights are cast and stay: one for which `has_fp8` is True, unless they are packed.

    Returns:
        A row for every kind of layer, with the reason where one is left alone.
    """
    owners = Counter(id(tensor) for module in model.modules() for tensor in module._parameters.values())
    packed = is_packed(model)
    findings = []
    for layer in decoder_layers(model):
        findings += [Finding("fp8_base", "Parameter", layer, reason=reason) for reason in _stacked(layer)]
        for parent, name, module, reason in _linears(layer):
            kernel = _KERNEL
            if isinstance(module, PackedLinear):
                reason = reason or module.obstacle_to_fp8(device)
                module.in_fp8, kernel = not reason, _PUBLISHED
            elif isinstance(module, nn.Linear):
                reason = reason or (_IN_16_BITS if packed else _obstacle(module, owners[id(module.weight)]))
                if not reason:
                    setattr(parent, name, Fp8Linear(module, device))
            findings.append(Finding("fp8_base", "Linear", parent, None if reason else kernel, reason=reason))
    if not any(finding.kernel for finding in findings):
        reasons = sorted({finding.reason for finding in findings}) or ["its decoder has no list of layers with any"]
        none = f"no linear layer of {type(without_adapters(model)).__name__} can"
        why = f"{'; '.join(reasons)}. Leave `fp8_base` out."
        if not packed:
            raise ValueError(f"`fp8_base` is true, but {none} be stored in fp8: {why}")
        warn_once("packed fp8_base", f"`fp8_base` is true, but {none} multiply in fp8: {why} (Said once.)")
    if not packed:
        _refuse_what_reads_weights(model)
    return tuple(rows(findings))


def _linears(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """The linear layers of `layer` that have a weight of the base: parent, name, module, and why to leave it alone."""
    for name, child in layer.named_children():
        base: Any = getattr(child, "base_layer", None)
        if is_lora_linear(child) and isinstance(base, nn.Linear | Fp8Linear):
            yield child, "base_layer", base, _obstacle_of_adapters(child)
        elif type(child).__module__.startswith("peft."):
            yield child, name, child, f"it is part of PEFT's {type(child).__name__}"
        elif isinstance(child, Fp8Linear):
            yield layer, name, child, ""
        elif isinstance(child, nn.Linear):
            small = min(child.in_features, child.out_features) < LEAST_FEATURES
            yield layer, name, child, f"no adapters and fewer than {LEAST_FEATURES} features" if small else ""
        else:
            yield from _linears(child)


def _obstacle_of_adapters(module: Any) -> str:
    variants = {type(variant).__name__ for variant in module.lora_variant.values()}
    if variants:
        return f"its adapters ({', '.join(sorted(variants))}) read the weight"
    return "its adapters are merged" if module.merged else ""


def _obstacle(module: nn.Linear, owners: int) -> str:
    weight = module.weight
    if type(module) is not nn.Linear:
        return f"it is a {type(module).__name__}, not a plain nn.Linear"
    if weight.requires_grad:
        return "it is trained"
    if owners > 1:
        return "its weight is another module's too"
    if is_dtensor(weight) or weight.is_meta or not weight.is_floating_point() or weight.dtype == torch.float64:
        return "its weight is split, elsewhere, or in another format"
    if any(size % MULTIPLE for size in weight.shape):
        return f"its weight is {tuple(weight.shape)}; the sizes must be multiples of {MULTIPLE}"
    foreign = "a hook" if is_call_hooked(module, of_all=False) else overriding_forward(module)
    return f"its forward is overridden by {foreign}" if foreign else ""


def _stacked(layer: nn.Module) -> Iterator[str]:
    for path, module in layer.named_modules():
        stacks = packed_stacks(module)
        yield from ["stacked weights of experts are decoded for their products"] * len(stacks)
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.dim() == 3 and not (stacks or parameter.requires_grad or "lora_" in name):
                yield "stacked weights of experts stay as they are"


def _refuse_what_reads_weights(model: nn.Module) -> None:
    BaseTuner, *_ = require(ADAPTERS_ON_FP8)
    base: Any = without_adapters(model)
    for module in model.modules():
        if isinstance(module, BaseTuner):
            module._check_merge_allowed = _refuse_to_merge
    base.save_pretrained = _refuse_to_save


def _refuse_to_merge(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "Adapters cannot be merged into a base in fp8 (`fp8_base`). Save them, and merge with `liger-trainer merge`, "
        "or load them with `PeftModel.from_pretrained` on the model as it was and merge there."
    )


def _refuse_to_save(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "The base is stored in fp8 (`fp8_base`), which `from_pretrained` does not read. Save the adapters "
        "(`trainer.save_model()`); `liger-trainer merge` makes a whole model of them."
    )
