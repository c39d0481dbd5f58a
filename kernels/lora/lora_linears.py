"""Linear layers with low-rank adapters on one input, as one operator with a backward of its own.

Formulas are in `_lora_products`. Saved for backward: x and z, a few columns; masks where there is dropout. Eager code
keeps x once more in the adapters' dtype, which is fp32 as a rule. Of a weight in 4 bits nothing else is saved.

The operators take flat lists, as their schemas demand: parameters of all layers in a row, and of all adapters;
`statistics` and `layouts` are what weights in 4 bits have beside their memory (`_base_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.lora import lora_products as products
from liger_trainer.kernels.lora.base_weights import weights_of
from liger_trainer.kernels.lora.lora_products import rows_of

FUNCTIONS = "lora_linear, lora_linears and lora_mlp"


def _spread(tensors: Sequence[torch.Tensor], present: Sequence[bool]) -> list[torch.Tensor | None]:
    """One of `tensors` at each place that has one."""
    remaining = iter(tensors)
    return [next(remaining) if has else None for has in present]


@torch.library.custom_op("liger_trainer::lora_linears", mutates_args=())
def lora_linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    layouts: Sequence[int],
    has_bias: Sequence[bool],
    layers: Sequence[int],
    scalings: Sequence[float],
    masked: Sequence[bool],
) -> list[torch.Tensor]:
    """Every layer's result and, last, z; call `lora_linear` or one of its kin, which check their inputs.

    `layers` says whose each adapter is. `biases` and `masks` hold those that there are.
    """
    adapters = products.adapters_of(lora_a, lora_b, masks, layers, scalings, masked)
    rows = rows_of(x)
    with torch.autocast(x.device.type, enabled=False):
        z = products.project_down(rows, adapters)
        results = []
        bases = zip(weights_of(weights, statistics, layouts), _spread(biases, has_bias))
        for index, (weight, bias) in enumerate(bases):
            y = products.project(rows, weight, bias, z, [each for each in adapters if each.layer == index])
            results.append(y.view(*x.shape[:-1], weight.shape[0]))
    return [*results, z]


@lora_linears.register_fake
def _(x, weights, biases, lora_a, lora_b, masks, statistics, layouts, *_):
    rank = sum(a.shape[0] for a in lora_a)
    tokens = x.numel() // x.shape[-1]
    widths = [weight.shape[0] for weight in weights_of(weights, statistics, layouts)]
    return [*(x.new_empty((*x.shape[:-1], width)) for width in widths), x.new_empty((tokens, rank))]


@torch.library.custom_op("liger_trainer::lora_linears_backward", mutates_args=())
def lora_linears_backward(
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
    has_bias: Sequence[bool],
    layers: Sequence[int],
    scalings: Sequence[float],
    masked: Sequence[bool],
    need_x: bool,
    need_weights: Sequence[bool],
    need_biases: Sequence[bool],
    need_a: bool,
    need_b: Sequence[bool],
) -> list[torch.Tensor]:
    """The gradients that are needed, in the order of the forward's arguments; those of all A below each other."""
    adapters = products.adapters_of(lora_a, lora_b, masks, layers, scalings, masked)
    dy, rows, gradients = [rows_of(each) for each in dy], rows_of(x), []
    with torch.autocast(x.device.type, enabled=False):
        dz = products.low_rank_gradient(dy, adapters)
        if need_x:
            bases = weights_of(weights, statistics, layouts)
            gradients.append(products.input_gradient(dy, bases, dz, adapters).view(x.shape))
        for upstream, weight, needed in zip(dy, weights, need_weights):
            if needed:
                gradients.append(products.product(upstream, rows, weight.dtype))
        with_bias = [upstream for upstream, has in zip(dy, has_bias) if has]
        for upstream, bias, needed in zip(with_bias, biases, need_biases):
            if needed:
                gradients.append(upstream.sum(0, dtype=bias.dtype))
        if need_a:
            gradients.append(products.a_gradients(dz, rows, adapters))
        gradients += [products.b_gradient(dy, z, each) for each, needed in zip(adapters, need_b) if needed]
    return gradients


@lora_linears_backward.register_fake
def _(dy, x, z, weights, biases, lora_a, lora_b, masks, *options):
    *_, need_x, need_weights, need_biases, need_a, need_b = options
    gradients = [torch.empty_like(x, memory_format=torch.contiguous_format)] if need_x else []
    for parameters, needs in ((weights, need_weights), (biases, need_biases)):
        gradients += [each.new_empty(each.shape) for each, needed in zip(parameters, needs) if needed]
    if need_a:
        dtype = products.widest(lora_a)
        gradients.append(lora_a[0].new_empty((z.shape[1], x.shape[-1]), dtype=dtype))
    return gradients + [each.new_empty(each.shape) for each, needed in zip(lora_b, need_b) if needed]


refuse_second_derivative(lora_linears_backward, FUNCTIONS)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, *lists = inputs
    # Statistics are not saved as activations are, for hooks to move: they are parts of the model.
    tensors, ctx.statistics, ctx.options = lists[:5], lists[5], lists[6:]
    ctx.lengths = [len(each) for each in tensors]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, output[-1], *(tensor for each in tensors for tensor in each))


def _backward(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    need_x, need_weights, need_biases, need_a, need_b, *_ = ctx.needs_input_grad
    x, z, *flat = ctx.saved_tensors
    remaining = iter(flat)
    tensors = [[next(remaining) for _ in range(length)] for length in ctx.lengths]
    weights, _, lora_a, _, masks = tensors
    # An empty list is a structure without leaves.
    constants: list[Any] = [[None] * len(ctx.statistics), *(None if each else [] for each in ctx.options)]
    if all(dy is None for dy in gradients[:-1]):
        return (None, *([None] * length for length in ctx.lengths), *constants)
    dy = [
        x.new_zeros((*x.shape[:-1], weight.shape[0])) if given is None else given
        for given, weight in zip(gradients, weights_of(weights, ctx.statistics, ctx.options[0]))
    ]
    needs = need_x, need_weights, need_biases, any(need_a), need_b
    results = iter(lora_linears_backward(dy, x, z, *tensors, ctx.statistics, *ctx.options, *needs))

    def take(needed: Sequence[bool]) -> list[torch.Tensor | None]:
        return [next(results) if each else None for each in needed]

    dx, dweights, dbiases = next(results) if need_x else None, take(need_weights), take(need_biases)
    da = split_rows(next(results), lora_a, need_a) if any(need_a) else [None] * len(lora_a)
    return dx, dweights, dbiases, da, take(need_b), [None] * len(masks), *constants


def split_rows(
    stacked: torch.Tensor, lora_a: Sequence[torch.Tensor], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradient of each A out of those of all; views, which differ in memory."""

    def parts() -> Iterator[torch.Tensor | None]:
        start = 0
        for a, need in zip(lora_a, needed):
            yield stacked[start : start + a.shape[0]].to(a.dtype) if need else None
            start += a.shape[0]

    return list(parts())


lora_linears.register_autograd(_backward, setup_context=_setup_context)
