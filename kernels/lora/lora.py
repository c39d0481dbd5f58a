"""Linear layers with low-rank adapters (LoRA, arXiv 2106.09685), alone and in a gated MLP, with backwards by hand.

    y = x @ W^T + b + s (m * x) @ A^T @ B^T

Layers of one input share the thin product with their A, and the gradient of the input is summed by the matmuls. x is
kept once, in its own dtype, whatever that of the adapters; formulas and what is saved are in `_lora_products`. Where W
is frozen neither its gradient nor, in an MLP, the product in front of the down projection is kept for the backward.

W may be in 4 bits (QLoRA, arXiv 2305.14314). Forward and backward each make it floating for their product, in a buffer
that all such products share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from liger_trainer.kernels.autocast import as_autocast
from liger_trainer.kernels.lora import lora_linears as operators
from liger_trainer.kernels.lora.base_weights import flat_weights
from liger_trainer.kernels.lora.nf4 import NF4Weight, check_weight, nf4_dequantize_reference


class LoRA(NamedTuple):
    """One adapter.

    Args:
        a: A, (rank, in_features), of any floating dtype.
        b: B, (out_features, rank).
        scaling: s; with dropout, 1 / (1 - p) is to be part of it.
        mask: Which elements of the input the adapter sees, booleans of the input's shape; None for all.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0
    mask: torch.Tensor | None = None


class LoRALayer(NamedTuple):
    """A linear layer with adapters.

    Args:
        weight: W, (out_features, in_features), floating or in 4 bits.
        bias: (out_features,), or None.
        adapters: Its adapters, whose products are added; may be empty.
    """

    weight: torch.Tensor | NF4Weight
    bias: torch.Tensor | None = None
    adapters: Sequence[LoRA] = ()


def lora_linear(
    x: torch.Tensor,
    weight: torch.Tensor | NF4Weight,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scaling: float = 1.0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``linear(x, weight, bias) + scaling * linear(linear(mask * x, lora_a), lora_b)``.

    Args:
        x: (..., in_features). All products are in its dtype; under autocast, in autocast's.
        weight: (out_features, in_features). A frozen one costs no gradient; one in 4 bits has none.
        bias: (out_features,), or None.
        lora_a: (rank, in_features). Gradients are computed and returned in its dtype.
        lora_b: (out_features, rank), likewise.
        scaling: See `LoRA`.
        mask: See `LoRA`.

    Returns:
        (..., out_features), in the dtype of the products.

    Raises:
        ValueError: If shapes or devices do not fit.
        RuntimeError: In a backward of the backward.
    """
    return lora_linears(x, [LoRALayer(weight, bias, (LoRA(lora_a, lora_b, scaling, mask),))])[0]


def lora_linears(x: torch.Tensor, layers: Sequence[LoRALayer]) -> tuple[torch.Tensor, ...]:
    """The results of several layers on one input; see `lora_linear`.

    Args:
        x: (..., in_features).
        layers: The layers, at least one.

    Returns:
        For each layer (..., out_features).

    Raises:
        ValueError: If there is no layer, or shapes or devices do not fit.
        RuntimeError: In a backward of the backward.
    """
    x = as_autocast(x)
    if any(layer.adapters for layer in layers):
        return lora_linears_operator(x, layers)
    _check(x, layers)
    return lora_linears_reference(x, layers)


def lora_linears_operator(x: torch.Tensor, layers: Sequence[LoRALayer]) -> tuple[torch.Tensor, ...]:
    """`lora_linears` by its operator, also where no layer has an adapter: then only the sum for x is fused."""
    _check(x, layers)
    adapters = [(index, adapter) for index, layer in enumerate(layers) for adapter in layer.adapters]
    memories, statistics, layouts = flat_weights([layer.weight for layer in layers])
    *results, _ = operators.lora_linears(
        x,
        memories,
        [layer.bias for layer in layers if layer.bias is not None],
        [adapter.a for _, adapter in adapters],
        [adapter.b for _, adapter in adapters],
        [adapter.mask for _, adapter in adapters if adapter.mask is not None],
        statistics,
        layouts,
        [layer.bias is not None for layer in layers],
        [index for index, _ in adapters],
        [float(adapter.scaling) for _, adapter in adapters],
        [adapter.mask is not None for _, adapter in adapters],
    )
    return tuple(results)


def _check(x: torch.Tensor, layers: Sequence[LoRALayer]) -> None:
    if not layers:
        raise ValueError("`layers` is empty; give at least one LoRALayer.")
    for layer in layers:
        _check_weight(layer.weight, x)
        if layer.bias is not None:
            _check_shape("bias", layer.bias, x, layer.weight.shape[0])
        check_adapters(x, layer)


def check_adapters(x: torch.Tensor, layer: LoRALayer) -> None:
    """Raises ValueError if the adapters of `layer` do not fit its weight, or its input `x`."""
    for a, b, _, mask in layer.adapters:
        _check_shape("lora_a", a, x, None, x.shape[-1])
        _check_shape("lora_b", b, x, layer.weight.shape[0], a.shape[0])
        if mask is not None and (mask.dtype != torch.bool or mask.numel() != x.numel()):
            raise ValueError(
                f"`mask` is {tuple(mask.shape)} {mask.dtype}; it must be booleans, one for each of `x`'s elements."
            )


def _check_weight(weight: torch.Tensor | NF4Weight, x: torch.Tensor) -> None:
    if isinstance(weight, torch.Tensor):
        _check_shape("weight", weight, x, None, x.shape[-1])
        return
    check_weight("weight", weight)
    if weight.shape[1] != x.shape[-1] or weight.device != x.device:
        raise ValueError(
            f"`weight` is {weight.shape} in 4 bits on {weight.device}; for an `x` of {tuple(x.shape)} on {x.device} it "
            f"must be (any, {x.shape[-1]}), on the same device."
        )


def _check_shape(name: str, tensor: torch.Tensor, x: torch.Tensor, *shape: int | None) -> None:
    fits = tensor.dim() == len(shape) and all(size in (None, given) for size, given in zip(shape, tensor.shape))
    if not fits or tensor.device != x.device or not tensor.is_floating_point():
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"`{name}` is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; for an `x` of {tuple(x.shape)} on "
            f"{x.device} it must be floating, ({wanted}), on the same device."
        )


def lora_linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor | NF4Weight,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scaling: float = 1.0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`lora_linear` in plain torch, with a derivative of every order."""
    return lora_linears_reference(x, [LoRALayer(weight, bias, (LoRA(lora_a, lora_b, scaling, mask),))])[0]


def lora_linears_reference(x: torch.Tensor, layers: Sequence[LoRALayer]) -> tuple[torch.Tensor, ...]:
    """`lora_linears` in plain torch, with a derivative of every order."""
    results = []
    for weight, bias, adapters in layers:
        floating = isinstance(weight, torch.Tensor)
        dense = weight.to(x.dtype) if floating else nf4_dequantize_reference(weight, x.dtype)
        y = F.linear(x, dense, None if bias is None else bias.to(x.dtype))
        for a, b, scaling, mask in adapters:
            seen = x if mask is None else x * mask.view(x.shape)
            y = y + F.linear(F.linear(seen, a.to(x.dtype)), b.to(x.dtype)) * scaling
        results.append(y)
    return tuple(results)
