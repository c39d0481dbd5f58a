"""Linear layers with low-rank adapters (LoRA, arXiv 2106.09685) on one input, as one operator.

    y = x @ W^T + b + s (m * x) @ A^T @ B^T

Layers of one input share the thin product with their A, and the matmuls sum the gradient of the input; the formulas are
in `lora_products.py`. Saved for backward: x, in its own dtype, and z = x @ A^T, a few columns; masks where there is
dropout. Eager code saves x once more in the adapters' dtype, usually fp32. Frozen weights cost no gradient.

W may be packed: in 4 bits (QLoRA, arXiv 2305.14314), or as a published checkpoint holds it
(`kernels/lowbit/formats.py`). Forward and backward each decode it for their product, into a buffer that all such
products share, and save only what is packed. Or W may be in fp8, and its products with it (`kernels/fp8/stored.py`).

The operator takes flat lists, as its schema demands: the parameters of all layers, then those of all adapters. Where
there is no bias or no mask, a tensor without elements is in its place. `statistics` and `layouts` are the remaining
parts of packed weights (`flat_weights`).

Shapes: x (..., in_features), W (out_features, in_features), A (rank, in_features), B (out_features, rank), z (tokens,
rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative
from liger_trainer.kernels.fp8.stored import Fp8Weight, dequantize
from liger_trainer.kernels.lora import lora_products as products
from liger_trainer.kernels.lora.lora_products import (
    Weight,
    flat_weights,
    lists_of,
    or_empty,
    or_none,
    rows_of,
    split_rows,
    weights_of,
)
from liger_trainer.kernels.lora.nf4 import NF4Weight, check_weight, nf4_dequantize_reference
from liger_trainer.kernels.lowbit.decode import decode_reference
from liger_trainer.kernels.lowbit.formats import check_packed
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast


class LoRA(NamedTuple):
    """A low-rank adapter.

    Args:
        a: A, (rank, in_features), of any floating dtype.
        b: B, (out_features, rank), of any floating dtype.
        scaling: s, the factor of the product. With dropout it must contain the 1 / (1 - p).
        mask: Which elements of the input dropout leaves to the adapter, booleans of the input's shape; None for all.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float = 1.0
    mask: torch.Tensor | None = None


class LoRALayer(NamedTuple):
    """A linear layer with adapters.

    Args:
        weight: W, (out_features, in_features), floating point, packed or in fp8.
        bias: (out_features,), or None.
        adapters: Adapters whose products are added; may be empty.
    """

    weight: Weight
    bias: torch.Tensor | None = None
    adapters: Sequence[LoRA] = ()


@operator("liger_trainer::lora_linears")
def _lora_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    layouts: Sequence[int],
    layers: Sequence[int],
    scalings: Sequence[float],
) -> list[torch.Tensor]:
    """The result of every layer and, last, z. It does not check its arguments.

    `layers` is the index of each adapter's layer.
    """
    adapters = products.adapters_of(lora_a, lora_b, masks, scalings, layers)
    rows = rows_of(x)
    with torch.autocast(x.device.type, enabled=False):
        z = products.project_down(rows, adapters)
        given = [bias if bias.numel() else None for bias in biases]
        results = products.linears(rows, weights_of(weights, statistics, layouts), given)
        for index, y in enumerate(results):
            products.add_adapters_(y, z, [each for each in adapters if each.layer == index])
            results[index] = y.view(*x.shape[:-1], y.shape[1])
    return [*results, z]


@_lora_linears.register_fake
def _(x, weights, biases, lora_a, lora_b, masks, statistics, layouts, layers, scalings):
    rank = sum(a.shape[0] for a in lora_a)
    tokens = x.numel() // x.shape[-1]
    widths = [weight.shape[0] for weight in weights_of(weights, statistics, layouts)]
    return [*(x.new_empty((*x.shape[:-1], width)) for width in widths), x.new_empty((tokens, rank))]


@operator("liger_trainer::lora_linears_backward")
def _lora_linears_backward(
    dy: Sequence[torch.Tensor],
    x: torch.Tensor,
    z: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    layouts: Sequence[int],
    layers: Sequence[int],
    scalings: Sequence[float],
    need_x: bool,
    need_weights: Sequence[bool],
    need_biases: Sequence[bool],
    need_a: bool,
    need_b: Sequence[bool],
) -> list[torch.Tensor]:
    """The gradients that are needed, in the order of the forward's arguments; those of all A as one matrix."""
    adapters = products.adapters_of(lora_a, lora_b, masks, scalings, layers)
    dy, rows, gradients = [rows_of(each) for each in dy], rows_of(x), []
    with torch.autocast(x.device.type, enabled=False):
        dz = products.low_rank_gradient(dy, adapters)
        if need_x:
            bases = weights_of(weights, statistics, layouts)
            gradients.append(products.input_gradient(dy, bases, dz, adapters).view(x.shape))
        for upstream, weight, needed in zip(dy, weights, need_weights):
            if needed:
                gradients.append(products.product(upstream, rows, weight.dtype))
        for upstream, bias, needed in zip(dy, biases, need_biases):
            if needed:
                gradients.append(upstream.sum(0, dtype=bias.dtype))
        if need_a:
            gradients.append(products.a_gradients(dz, rows, adapters))
        gradients += [products.b_gradient(dy, z, each) for each, needed in zip(adapters, need_b) if needed]
    return gradients


@_lora_linears_backward.register_fake
def _(
    dy, x, z, weights, biases, lora_a, lora_b, masks, statistics, layouts, layers, scalings,
    need_x, need_weights, need_biases, need_a, need_b,
):  # fmt: skip
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format)] if need_x else []
    gradients += [each.new_empty(each.shape) for each, needed in zip(weights, need_weights) if needed]
    gradients += [each.new_empty(each.shape) for each, needed in zip(biases, need_biases) if needed]
    if need_a:
        gradients.append(lora_a[0].new_empty((z.shape[1], x.shape[-1]), dtype=products.widest(lora_a)))
    return gradients + [each.new_empty(each.shape) for each, needed in zip(lora_b, need_b) if needed]


refuse_second_derivative(_lora_linears_backward, "lora_linear, lora_linears and lora_mlp")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weights, *lists, ctx.statistics, ctx.layouts, ctx.layers, ctx.scalings = inputs
    # The statistics are part of the model as well: see `keep_packed`.
    ctx.lengths = [len(weights), *(len(each) for each in lists)]
    rest = (tensor for each in lists for tensor in or_none(each))
    ctx.save_for_backward(x, output[-1], *products.keep_packed(ctx, weights), *rest)


def _backward(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    need_x, need_weights, need_biases, need_a, need_b = ctx.needs_input_grad[:5]
    x, z, *flat = ctx.saved_tensors
    weights, biases, lora_a, lora_b, masks = lists_of(or_empty(flat, x), ctx.lengths)
    weights = products.with_packed(ctx, weights)
    dy = [
        x.new_zeros((*x.shape[:-1], weight.shape[0])) if given is None else given
        for given, weight in zip(gradients, weights_of(weights, ctx.statistics, ctx.layouts))
    ]
    results = iter(
        _lora_linears_backward(
            *(dy, x, z, weights, biases, lora_a, lora_b, masks, ctx.statistics, ctx.layouts, ctx.layers, ctx.scalings),
            *(need_x, need_weights, need_biases, any(need_a), need_b),
        )
    )
    dx = next(results) if need_x else None
    dweights = [next(results) if needed else None for needed in need_weights]
    dbiases = [next(results) if needed else None for needed in need_biases]
    da = split_rows(next(results), lora_a, need_a) if any(need_a) else [None] * len(lora_a)
    db = [next(results) if needed else None for needed in need_b]
    return input_gradients(ctx, dx, dweights, dbiases, da, db)


_lora_linears.register_autograd(_backward, setup_context=_setup_context)


def lora_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    lora_a: torch.Tensor,
    lora_b: torch.Tensor,
    scaling: float = 1.0,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """``linear(x, weight, bias) + scaling * linear(linear(mask * x, lora_a), lora_b)``.

    Args:
        x: (..., in_features). All products are in its dtype; under autocast, in that of autocast.
        weight: (out_features, in_features). No gradient is computed for a frozen weight; a quantised one has none.
        bias: (out_features,), or None.
        lora_a: (rank, in_features). Its gradient is computed and returned in its dtype.
        lora_b: (out_features, rank). Its gradient is computed and returned in its dtype.
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
    """`lora_linears` by its operator, even if no layer has an adapter: then only the sum for dx is fused."""
    _check(x, layers)
    adapters = [(index, adapter) for index, layer in enumerate(layers) for adapter in layer.adapters]
    tensors, statistics, layouts = flat_weights([layer.weight for layer in layers])
    *results, _ = _lora_linears(
        x,
        tensors,
        or_empty([layer.bias for layer in layers], x),
        [adapter.a for _, adapter in adapters],
        [adapter.b for _, adapter in adapters],
        or_empty([adapter.mask for _, adapter in adapters], x),
        statistics,
        layouts,
        [index for index, _ in adapters],
        [float(adapter.scaling) for _, adapter in adapters],
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
                f"`mask` is {tuple(mask.shape)} {mask.dtype}; it must be booleans, one for each element of `x`."
            )


def _check_weight(weight: Weight, x: torch.Tensor) -> None:
    if isinstance(weight, torch.Tensor):
        _check_shape("weight", weight, x, None, x.shape[-1])
        return
    bits = "4 bits" if isinstance(weight, NF4Weight) else "fp8" if isinstance(weight, Fp8Weight) else "a packed format"
    if isinstance(weight, NF4Weight):
        check_weight("weight", weight)
    elif not isinstance(weight, Fp8Weight):
        check_packed("weight", weight)
    if len(weight.shape) != 2 or weight.shape[1] != x.shape[-1] or weight.device != x.device:
        raise ValueError(
            f"`weight` is {tuple(weight.shape)} in {bits} on {weight.device}; for an `x` of {tuple(x.shape)} on "
            f"{x.device} it must be (any, {x.shape[-1]}), on the same device."
        )


def _check_shape(name: str, tensor: torch.Tensor, x: torch.Tensor, *shape: int | None) -> None:
    fits = tensor.dim() == len(shape) and all(size in (None, given) for size, given in zip(shape, tensor.shape))
    if not fits or tensor.device != x.device or not tensor.is_floating_point():
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(
            f"`{name}` is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; for an `x` of {tuple(x.shape)} on "
            f"{x.device} it must be floating point, ({wanted}), on the same device."
        )


def lora_linear_reference(
    x: torch.Tensor,
    weight: Weight,
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
        y = F.linear(x, _dense(weight, x.dtype), None if bias is None else bias.to(x.dtype))
        for a, b, scaling, mask in adapters:
            seen = x if mask is None else x * mask.view(x.shape)
            y = y + F.linear(F.linear(seen, a.to(x.dtype)), b.to(x.dtype)) * scaling
        results.append(y)
    return tuple(results)


def _dense(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight.to(dtype)
    if isinstance(weight, Fp8Weight):
        return dequantize(weight, dtype)
    if isinstance(weight, NF4Weight):
        return nf4_dequantize_reference(weight, dtype)
    return decode_reference(weight, dtype)
