"""Quantises a model in memory with bitsandbytes, as transformers does when it loads one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def quantise(
    model: Any,
    kind: str = "nf4",
    *,
    keep: tuple[str, ...] = ("lm_head",),
    compute_dtype: torch.dtype | None = None,
    **options: Any,
) -> Any:
    """Replaces every linear layer of `model` by one of bitsandbytes, and freezes the model.

    Stacked experts are not quantised: `quantize_experts` does that once they have adapters.

    Args:
        model: On its device, with its weights.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        keep: Last names of linear layers that are not quantised.
        compute_dtype: Dtype of products with 4-bit weights; the weights' dtype by default.
        options: Options of 4-bit weights: ``compress_statistics``, ``blocksize``, ``quant_storage``.

    Returns:
        The model.
    """
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.split(".")[-1] not in keep:
            new = _int8(module) if kind == "int8" else _four_bits(module, kind, compute_dtype, options)
            new.bias = module.bias
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new.to(module.weight.device))  # moving it quantises it
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return model.requires_grad_(False)


def _int8(layer: nn.Linear) -> Any:
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    with torch.device("meta"):  # avoids random weights that would be thrown away
        new = Linear8bitLt(
            layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False, threshold=6.0
        )
    new.weight = Int8Params(layer.weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
    return new


def _four_bits(layer: nn.Linear, kind: str, compute_dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    from bitsandbytes.nn import Linear4bit, Params4bit

    sizes, storage = (layer.in_features, layer.out_features), options.get("quant_storage", torch.uint8)
    with torch.device("meta"):
        new = Linear4bit(
            *sizes, layer.bias is not None, compute_dtype or layer.weight.dtype, quant_type=kind, quant_storage=storage
        )
    new.weight = Params4bit(layer.weight.data, requires_grad=False, quant_type=kind, module=new, **options)
    return new
