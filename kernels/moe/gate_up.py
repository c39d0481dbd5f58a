"""The first linear layer of a block of experts as an operator that keeps its weight, and its input, a row a token.

::

    pre_r = x_t @ W1_e^T + b1_e        dx = combine(dpre @ W1)        dW1_e = sum over the rows of e of dpre_r^T x_t

The layer may have adapters (`_moe_lora`), lists of their factors, which are all that is saved for them. Nothing but the
gradients of the weight and of the adapters reads the input: where these are frozen it is not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import second_derivative_message
from liger_trainer.kernels.moe import expert_lora as lora
from liger_trainer.kernels.moe.grouped_matmul import (
    combine_rows,
    grouped_rows,
    grouped_weight_gradient,
    rows_of_choices,
)
from liger_trainer.kernels.moe.routing import ExpertRows


@torch.library.custom_op("liger_trainer::moe_gate_up", mutates_args=())
def moe_gate_up(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    order: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    scalings: Sequence[float],
    top_k: int,
    transposed: bool,
) -> torch.Tensor:
    """The first product, (R, N), of hidden (T, H): its row r is of the token and the expert of choice ``order[r]``."""
    rows = ExpertRows(order, slots, offsets)
    x, top_k = rows_of_choices(hidden, weight, rows, top_k)
    term = lora.forward_term(x, lora.stacked(lora_a, lora_b, scalings, x.dtype), rows, top_k)
    return grouped_rows(x, weight, rows, top_k=top_k, transposed=transposed, bias=bias, extra=term)


@moe_gate_up.register_fake
def _(hidden, weight, bias, lora_a, lora_b, order, slots, offsets, scalings, top_k, transposed):
    return hidden.new_empty(order.shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op("liger_trainer::moe_gate_up_backward", mutates_args=())
def _gate_up_backward(
    dpre: torch.Tensor,
    hidden: torch.Tensor | None,
    weight: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    order: torch.Tensor,
    slots: torch.Tensor,
    offsets: torch.Tensor,
    scalings: Sequence[float],
    top_k: int,
    transposed: bool,
    need_hidden: bool,
    need_weight: bool,
    need_bias: bool,
    need_a: bool,
    need_b: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of hidden, weight, bias and the adapters, stacked; one that is not needed has no elements.

    Hidden is needed for those of the weight and the adapters.
    """
    rows = ExpertRows(order, slots, offsets)
    adapters = lora.stacked(lora_a, lora_b, scalings, dpre.dtype)
    term = lora.backward_term(dpre, adapters, rows) if need_hidden or need_a else None
    dhidden, dweight, dbias = (dpre.new_empty(0) for _ in range(3))
    if need_hidden:
        dhidden = combine_rows(grouped_rows(dpre, weight, rows, transposed=not transposed, extra=term), rows, top_k)
    if hidden is not None:
        hidden, top_k = rows_of_choices(hidden, weight, rows, top_k)
    if need_weight:
        assert hidden is not None
        left, right = ((hidden, top_k), (dpre, 0)) if transposed else ((dpre, 0), (hidden, top_k))
        dweight = grouped_weight_gradient(left[0], right[0], rows, left_top_k=left[1], right_top_k=right[1])
    if need_bias:
        dbias = bias_gradient(dpre, rows)
    return dhidden, dweight, dbias, *lora.gradients(adapters, term, dpre, hidden, rows, 0, top_k, need_a, need_b)


@_gate_up_backward.register_fake
def _(dpre, hidden, weight, lora_a, lora_b, order, slots, offsets, scalings, top_k, transposed, *needs):
    need_hidden, need_weight, need_bias, need_a, need_b = needs
    shape = order.shape[0] // top_k, weight.shape[1 if transposed else 2]
    return (
        dpre.new_empty(shape) if need_hidden else dpre.new_empty(0),
        weight.new_empty(weight.shape) if need_weight else dpre.new_empty(0),
        dpre.new_empty(weight.shape[0], dpre.shape[1]) if need_bias else dpre.new_empty(0),
        *lora.fake_gradients(dpre, lora_a, lora_b, need_a, need_b),
    )


def bias_gradient(dpre: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """The sum of `dpre` (R, N) over the rows of each expert, (E, N)."""
    ones = dpre.new_ones(dpre.shape[0], 16)  # a whole step of the matrix units; one column of it is the sum
    return grouped_weight_gradient(ones, dpre, rows)[:, 0].contiguous()


def _setup_gate_up(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    hidden, weight, _, lora_a, lora_b, order, slots, offsets, ctx.scalings, ctx.top_k, ctx.transposed = inputs
    ctx.set_materialize_grads(False)
    reads_hidden = any(parameter.requires_grad for parameter in (weight, *lora_a, *lora_b))
    ctx.save_for_backward(*lora_a, *lora_b, hidden if reads_hidden else None, weight, order, slots, offsets)


def _backward_gate_up(ctx: Any, dpre: torch.Tensor | None) -> tuple[Any, ...]:
    if dpre is None:
        return None, None, None, *lora.no_gradients(ctx.scalings), *lora.constants(ctx.scalings, 2)
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("moe_experts"))
    lora_a, lora_b, hidden, weight, *rows = lora.saved(ctx)
    need_a, need_b = ctx.needs_input_grad[3:5]
    needs = ctx.needs_input_grad[:3]
    *gradients, da, db = _gate_up_backward(
        dpre.contiguous(),
        hidden,
        weight,
        lora_a,
        lora_b,
        *rows,
        ctx.scalings,
        ctx.top_k,
        ctx.transposed,
        *needs,
        any(need_a),
        any(need_b),
    )
    adapters = lora.split(da, db, lora_a, lora_b, ctx.scalings, need_a, need_b)
    return *(x if needed else None for x, needed in zip(gradients, needs)), *adapters, *lora.constants(ctx.scalings, 2)


moe_gate_up.register_autograd(_backward_gate_up, setup_context=_setup_gate_up)
