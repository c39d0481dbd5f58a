"""A model that is in memory already, quantised by bitsandbytes as transformers quantises one that it loads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def quantise(model: Any, kind: str = "nf4", *, keep: tuple[str, ...] = ("lm_head",), **options: Any) -> Any:
    """Puts a layer of bitsandbytes in the place of every linear layer of `model`, which it freezes.

    Args:
        model: On its device, with its weights.
        kind: ``"nf4"``, ``"fp4"`` or ``"int8"``.
        keep: Last names of linear layers that stay as they are.
        options: Of layers in 4 bits: ``compress_statistics``, ``quant_storage``, and ``compute_dtype``, which is the
            weights' dtype unless given.

    Returns:
        The model.
    """
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name.split(".")[-1] not in keep:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, _quantised(module, kind, options))
    setattr(model, "is_loaded_in_8bit" if kind == "int8" else "is_loaded_in_4bit", True)
    return model.requires_grad_(False)


def _quantised(layer: nn.Linear, kind: str, options: dict[str, Any]) -> nn.Module:
    from bitsandbytes import nn as layers

    shape, device, weight = (
        (layer.in_features, layer.out_features, layer.bias is not None),
        layer.weight.device,
        layer.weight,
    )
    new: Any
    with torch.device("meta"):  # its own weight would be drawn, and thrown away
        if kind == "int8":
            new = layers.Linear8bitLt(*shape, has_fp16_weights=False, threshold=6.0)
        else:
            new = layers.Linear4bit(*shape, quant_type=kind, **{"compute_dtype": weight.dtype, **options})
    if kind == "int8":
        new.weight = layers.Int8Params(weight.data.cpu(), requires_grad=False, has_fp16_weights=False)
    else:
        kept = {name: value for name, value in options.items() if name != "compute_dtype"}
        new.weight = layers.Params4bit(weight.data, requires_grad=False, quant_type=kind, module=new, **kept)
    new.bias = layer.bias
    return new.to(weight.device)  # which quantises
