"""The second linear layer of a block of experts, and the activation in front of it, as operators.

They save pre (R, 2 I), the routing weights and the layer's weight. The product of activation and gate and the k rows of
every token, which a plain implementation keeps, are built again or never exist. With g = dO_t @ W2 the gradient of the
routing weights is ``<g, h>``, so that the product's output, ``(R, H)``, is not kept for it either (arXiv 2512.14080).

The layer is two operators, as in `gated_down`: under a checkpoint the recomputation needs pre, but not the output.

It may have adapters (`_moe_lora`), lists of their factors, which are all that is saved for them. g is then of the
adapted layer, so that the gradient of the routing weights stays ``<g, h>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import second_derivative_message
from liger_trainer.kernels.moe import expert_lora as lora
from liger_trainer.kernels.moe.activation import IDENTITY, activate, activation_gradients
from liger_trainer.kernels.moe.grouped_matmul import (
    combine_rows,
    grouped_rows,
    grouped_weight_gradient,
    rows_of_choices,
)
from liger_trainer.kernels.moe.routing import ExpertRows
from liger_trainer.kernels.runtime import graph_is_kept


@torch.library.custom_op("liger_trainer::moe_down_save", mutates_args=())
def moe_down_save(
    pre: torch.Tensor,
    top_k_weights: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    order: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    scalings: Sequence[float],
    activation: str,
    scalars: Sequence[float],
    gated: bool,
    interleaved: bool,
    transposed: bool,
) -> torch.Tensor:
    """Stands in for the block's output, whose gradient it turns into those of the operands."""
    return stand_in(pre, top_k_weights, weight, transposed)


@moe_down_save.register_fake
def _(pre, top_k_weights, weight, *options):
    return stand_in(pre, top_k_weights, weight, options[-1])


def stand_in(pre: torch.Tensor, top_k_weights: torch.Tensor, weight: torch.Tensor, transposed: bool) -> torch.Tensor:
    """Zeros of the output's shape, (T, H), that share one element of memory."""
    return pre.new_zeros(()).expand(top_k_weights.shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op("liger_trainer::moe_down", mutates_args=())
def moe_down(
    stand_in: torch.Tensor,
    pre: torch.Tensor,
    top_k_weights: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    order: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    scalings: Sequence[float],
    activation: str,
    scalars: Sequence[float],
    gated: bool,
    interleaved: bool,
    transposed: bool,
) -> torch.Tensor:
    """The output (T, H), ``sum over j of w_tj (act(pre_r) @ W_e^T + b_e)``, whose gradient goes to `stand_in`."""
    rows = ExpertRows(order, slots, offsets)
    h = activate(pre, activation, scalars, gated, interleaved)
    term = lora.forward_term(h, lora.stacked(lora_a, lora_b, scalings, h.dtype), rows)
    y = grouped_rows(h, weight, rows, transposed=transposed, bias=bias, extra=term)
    return combine_rows(y, rows, top_k_weights.shape[1], top_k_weights)


@moe_down.register_fake
def _(stand_in, pre, *_):
    return pre.new_empty(stand_in.shape)


def _keep_scalings(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.scalings = inputs[10]


def _hand_over(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    return dout, *(None,) * 4, *lora.no_gradients(ctx.scalings), *lora.constants(ctx.scalings, 5)


moe_down.register_autograd(_hand_over, setup_context=_keep_scalings)


@torch.library.custom_op("liger_trainer::moe_down_backward", mutates_args=())
def _down_backward(
    dout: torch.Tensor,
    pre: torch.Tensor,
    top_k_weights: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    order: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    scalings: Sequence[float],
    activation: str,
    scalars: Sequence[float],
    gated: bool,
    interleaved: bool,
    transposed: bool,
    need_weight: bool,
    need_bias: bool,
    need_a: bool,
    need_b: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of pre, the routing weights, weight, bias and the adapters, stacked.

    From that of weight on, one that is not needed has no elements.
    """
    tensors = dout, pre, top_k_weights, weight, bias, lora_a, lora_b, order, slots, offsets, scalings
    options = activation, scalars, gated, interleaved, transposed, need_weight, need_bias, need_a, need_b
    return _down_gradients(*(tensors + options), overwrite=False)


@_down_backward.register_fake
def _(dout, pre, *others):
    return torch.empty_like(pre), *_fake_down_gradients(pre, *others)


def _fake_down_gradients(pre, top_k_weights, weight, bias, lora_a, lora_b, *options):
    need_weight, need_bias, need_a, need_b = options[-4:]
    return (
        torch.empty_like(top_k_weights),
        weight.new_empty(weight.shape) if need_weight else pre.new_empty(0),
        bias.new_empty(bias.shape) if need_bias else pre.new_empty(0),
        *lora.fake_gradients(pre, lora_a, lora_b, need_a, need_b),
    )


@torch.library.custom_op("liger_trainer::moe_down_backward_", mutates_args=("pre",))
def _down_backward_(
    dout: torch.Tensor,
    pre: torch.Tensor,
    top_k_weights: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    order: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    scalings: Sequence[float],
    activation: str,
    scalars: Sequence[float],
    gated: bool,
    interleaved: bool,
    transposed: bool,
    need_weight: bool,
    need_bias: bool,
    need_a: bool,
    need_b: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `_down_backward`, with the gradient of pre written over pre."""
    tensors = dout, pre, top_k_weights, weight, bias, lora_a, lora_b, order, slots, offsets, scalings
    options = activation, scalars, gated, interleaved, transposed, need_weight, need_bias, need_a, need_b
    dpre, *others = _down_gradients(*(tensors + options), overwrite=True)
    if dpre.data_ptr() != pre.data_ptr():
        pre.copy_(dpre)
    return tuple(others)  # type: ignore[return-value]


@_down_backward_.register_fake
def _(dout, pre, *others):
    return _fake_down_gradients(pre, *others)


def _down_gradients(
    dout: torch.Tensor,
    pre: torch.Tensor,
    top_k_weights: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    order: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    scalings: Sequence[float],
    activation: str,
    scalars: Sequence[float],
    gated: bool,
    interleaved: bool,
    transposed: bool,
    need_weight: bool,
    need_bias: bool,
    need_a: bool,
    need_b: bool,
    overwrite: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = ExpertRows(order, slots, offsets)
    douts, top_k = rows_of_choices(dout, weight, rows, top_k_weights.shape[1])
    adapters = lora.stacked(lora_a, lora_b, scalings, pre.dtype)
    term = lora.backward_term(douts, adapters, rows, top_k)
    dh = grouped_rows(douts, weight, rows, top_k=top_k, transposed=not transposed, extra=term)
    need_h = need_weight or need_a or need_b
    dpre, dweights, weighted_h = activation_gradients(
        dh, pre, top_k_weights, rows, activation, scalars, gated, interleaved, need_h, overwrite
    )
    # dO is without the routing weight in them, as it is in h.
    da, db = lora.gradients(adapters, term, douts, weighted_h, rows, top_k, 0, need_a, need_b)
    dweight, dbias = pre.new_empty(0), None
    if need_weight:
        assert weighted_h is not None
        left, right = ((weighted_h, 0), (douts, top_k)) if transposed else ((douts, top_k), (weighted_h, 0))
        dweight = grouped_weight_gradient(left[0], right[0], rows, left_top_k=left[1], right_top_k=right[1])
    if bias is not None:
        dweights, dbias = _through_bias(dout, dweights, top_k_weights, bias, rows, need_bias)
    return dpre, dweights, dweight, pre.new_empty(0) if dbias is None else dbias, da, db


def _through_bias(
    dout: torch.Tensor,
    dweights: torch.Tensor,
    top_k_weights: torch.Tensor,
    bias: torch.Tensor,
    rows: ExpertRows,
    need_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the second bias, weighted like the rest of a row, adds to the routing weights' gradient, and its own."""
    top_k = top_k_weights.shape[1]
    experts = torch.searchsorted(rows.offsets[1:], rows.slots, right=True).clamp(max=bias.shape[0] - 1).view(-1, top_k)
    exists = rows.slots.view(-1, top_k) < rows.offsets[-1]
    products = (dout @ bias.T.to(dout.dtype)).gather(1, experts)  # one matmul and k numbers a token, not k rows
    dweights = dweights + torch.where(exists, products, 0.0).to(dweights.dtype)
    if not need_bias:
        return dweights, None
    # dense (T, E): the weight of each expert in each token
    weights = torch.where(exists, top_k_weights, 0.0)
    shares = weights.new_zeros(len(weights), bias.shape[0]).scatter_add_(1, experts, weights)
    return dweights, (shares.T.to(dout.dtype) @ dout).to(bias.dtype)


def _setup_down(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    pre, top_k_weights, weight, bias, lora_a, lora_b, order, slots, offsets, ctx.scalings, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*lora_a, *lora_b, pre, top_k_weights, weight, bias, order, slots, offsets)


def _backward_down(ctx: Any, dout: torch.Tensor | None) -> tuple[Any, ...]:
    if dout is None:
        return *(None,) * 4, *lora.no_gradients(ctx.scalings), *lora.constants(ctx.scalings, 5)
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("moe_experts"))
    lora_a, lora_b, pre, top_k_weights, weight, bias, *rows = lora.saved(ctx)
    need_a, need_b = ctx.needs_input_grad[4:6]
    needs = ctx.needs_input_grad[2:4]
    tensors = top_k_weights, weight, bias, lora_a, lora_b, *rows
    arguments = *tensors, ctx.scalings, *ctx.options, *needs, any(need_a), any(need_b)
    if graph_is_kept() or ctx.options[0] == IDENTITY:  # what made pre may read it too
        dpre, *gradients = _down_backward(dout.contiguous(), pre, *arguments)
    else:
        # Nobody but us sees pre, and this backward is the last to read it.
        dpre = pre.detach()
        gradients = _down_backward_(dout.contiguous(), dpre, *arguments)
    dweights, dweight, dbias, da, db = gradients
    adapters = lora.split(da, db, lora_a, lora_b, ctx.scalings, need_a, need_b)
    return (
        dpre,
        dweights,
        dweight if needs[0] else None,
        dbias if needs[1] else None,
        *adapters,
        *lora.constants(ctx.scalings, 5),
    )


moe_down_save.register_autograd(_backward_down, setup_context=_setup_down)
