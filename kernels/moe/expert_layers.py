"""The two linear layers of a block of experts, with the activation between them, as operators.

With r a row, t its token, e its expert, w its routing weight, and g_r = dO_t @ W2_e::

    pre_r = x_t @ W1_e^T + b1_e                           o_t = sum over the rows of t of w_r (h_r @ W2_e^T + b2_e)
    dx = combine(dpre @ W1)                               dpre, dw = f(g, pre), see `activation.py`
    dW1_e = sum over the rows of e of dpre_r^T x_t        dW2_e = sum over the rows of e of dO_t^T (w_r h_r)

The first operator saves its weight and its input with one row per token; only the gradients of the weight and of the
adapters read the input, so where these are frozen it is not saved.

The second saves pre (R, 2 I), the routing weights and its weight. h, and the k rows of each token, which a plain
implementation saves, are recomputed or never built: the gradient of a routing weight is ``<g, h>``, so the rows of the
output, (R, H), are not needed for it either (arXiv 2512.14080).

The second layer is two operators, as in `gated_down.py`: under a checkpoint the recomputation needs pre but not the
output. `moe_down_save` saves and returns a placeholder for the output, without memory; `moe_down` computes the output,
saves nothing, and passes its gradient on to the placeholder.

Either layer may have adapters (`expert_lora.py`), given as lists of their factors, which are all that is saved for
them. g is then that of the adapted layer, so the gradient of a routing weight is still ``<g, h>``.

A frozen weight may be packed (`kernels/lowbit/formats.py`). Forward and backward each decode it for their product
(`packed_rows.py`); neither what is decoded nor what is packed is saved.

Shapes: T tokens, k choices of each, R = T k rows sorted by expert, E experts, H hidden size, I intermediate size, N = 2
I or I.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.activation import IDENTITY, GatedActivation
from liger_trainer.kernels.autograd import (
    input_gradients,
    pass_to_placeholder,
    second_derivative_message,
    where_needed,
)
from liger_trainer.kernels.lowbit.formats import PackedWeight, packed_of
from liger_trainer.kernels.moe import expert_lora as lora
from liger_trainer.kernels.moe.activation import activate, activation_gradients_
from liger_trainer.kernels.moe.grouped_matmul import grouped_rows, grouped_weight_gradient, rows_of_choices
from liger_trainer.kernels.moe.packed_rows import packed_rows
from liger_trainer.kernels.moe.sort_by_expert import ExpertRows
from liger_trainer.kernels.moe.token_rows import combine_rows
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import graph_is_kept

_FIRST, _SECOND = 0, 1  # slots of the buffer of decoded weights


class ExpertLayer(NamedTuple):
    """A linear layer of all experts, and the rows of each expert.

    Args:
        weight: (E, out, in), or (E, in, out) if it is `transposed`; or the codes of one that is packed.
        bias: (E, out), or None; backwards that do not read it get None.
        lora_a: A of each adapter.
        lora_b: B of each adapter.
        expert_rows: The tensors of an `ExpertRows`.
        scalings: The factor of each adapter.
        transposed: How the weight is stored.
        statistics: The other tensors of a packed weight.
        layout: Its layout; empty for any other.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora_a: Sequence[torch.Tensor]
    lora_b: Sequence[torch.Tensor]
    expert_rows: Sequence[torch.Tensor]
    scalings: Sequence[float]
    transposed: bool
    statistics: Sequence[torch.Tensor]
    layout: Sequence[int]

    @property
    def base(self) -> torch.Tensor | PackedWeight:
        """The weight, of either kind."""
        return packed_of(self.weight, self.statistics, self.layout) if self.layout else self.weight

    @property
    def rows(self) -> ExpertRows:
        """The rows of each expert."""
        return ExpertRows(*self.expert_rows)

    @property
    def widths(self) -> tuple[int, int]:
        """Features of the output and of the input."""
        _, first, second = self.base.shape
        return (second, first) if self.transposed else (first, second)

    def adapters(self, dtype: torch.dtype) -> lora.Stacked | None:
        """The adapters as one, in `dtype`; None without adapters."""
        return lora.stacked(self.lora_a, self.lora_b, self.scalings, dtype)

    def rows_of_choices(self, x: torch.Tensor, top_k: int) -> tuple[torch.Tensor, int]:
        """`rows_of_choices` for products with the weight."""
        return rows_of_choices(x, x if self.layout else self.weight, self.rows, top_k)

    def product(
        self,
        x: torch.Tensor,
        slot: int,
        *,
        backward: bool,
        top_k: int = 0,
        extra: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The rows times the weight, with the bias; or, for `backward`, times its transpose. See `grouped_rows`."""
        base, transposed = self.base, self.transposed != backward
        bias = None if backward else self.bias
        if isinstance(base, torch.Tensor):
            return grouped_rows(x, base, self.rows, top_k=top_k, transposed=transposed, bias=bias, extra=extra)
        return packed_rows(x, base, self.rows, slot, top_k=top_k, transposed=transposed, bias=bias, extra=extra)


# ---------------------------------------------------------------------------------------------------------------------
# The first layer
# ---------------------------------------------------------------------------------------------------------------------


@operator("liger_trainer::moe_gate_up")
def moe_gate_up(hidden: torch.Tensor, layer: ExpertLayer, top_k: int) -> torch.Tensor:
    """The first product, (R, N), of hidden (T, H): row r is that of the token and the expert of choice ``order[r]``."""
    x, top_k = layer.rows_of_choices(hidden, top_k)
    term = lora.forward_term(x, layer.adapters(x.dtype), layer.rows, top_k)
    return layer.product(x, _FIRST, backward=False, top_k=top_k, extra=term)


@moe_gate_up.register_fake
def _(hidden, layer, top_k):
    return hidden.new_empty(layer.expert_rows[0].shape[0], layer.widths[0])


@operator("liger_trainer::moe_gate_up_backward")
def _gate_up_backward(
    dpre: torch.Tensor, hidden: torch.Tensor | None, layer: ExpertLayer, top_k: int, needs: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of hidden, weight and bias, and those of the adapters' A and B, stacked.

    `needs` says which; one that is not needed has no elements. `hidden` is needed for all but its own and the bias's.
    """
    need_hidden, need_weight, need_bias, need_a, need_b = needs
    rows, adapters = layer.rows, layer.adapters(dpre.dtype)
    term = lora.backward_term(dpre, adapters, rows) if need_hidden or need_a else None
    dhidden, dweight, dbias = dpre.new_empty(0), dpre.new_empty(0), dpre.new_empty(0)
    if need_hidden:
        dhidden = combine_rows(layer.product(dpre, _FIRST, backward=True, extra=term), rows, top_k)
    if hidden is not None:
        hidden, top_k = layer.rows_of_choices(hidden, top_k)
    if need_weight:
        assert hidden is not None
        dweight = _weight_gradient(dpre, 0, hidden, top_k, rows, layer.transposed)
    if need_bias:
        dbias = _bias_gradient(dpre, rows)
    da, db = lora.gradients(adapters, term, dpre, hidden, rows, 0, top_k, need_a, need_b)
    return dhidden, dweight, dbias, da, db


@_gate_up_backward.register_fake
def _(dpre, hidden, layer, top_k, needs):
    need_hidden, need_weight, need_bias, need_a, need_b = needs
    shape, weight = (layer.expert_rows[0].shape[0] // top_k, layer.widths[1]), layer.weight
    return (
        dpre.new_empty(shape if need_hidden else 0),
        dpre.new_empty(weight.shape if need_weight else 0),
        dpre.new_empty((weight.shape[0], dpre.shape[1]) if need_bias else 0),
        *lora.fake_gradients(dpre, layer.lora_a, layer.lora_b, need_a, need_b),
    )


def _weight_gradient(
    dy: torch.Tensor, dy_top_k: int, x: torch.Tensor, x_top_k: int, rows: ExpertRows, transposed: bool
) -> torch.Tensor:
    """The gradient of the weight of ``y = x @ W.T``; each `top_k` is as in `grouped_weight_gradient`."""
    if transposed:
        return grouped_weight_gradient(x, dy, rows, left_top_k=x_top_k, right_top_k=dy_top_k)
    return grouped_weight_gradient(dy, x, rows, left_top_k=dy_top_k, right_top_k=x_top_k)


def _bias_gradient(dpre: torch.Tensor, rows: ExpertRows) -> torch.Tensor:
    """The sum of `dpre` (R, N) over the rows of each expert, (E, N)."""
    ones = dpre.new_ones(dpre.shape[0], 16)  # a whole step of the matrix units; one column of it is the sum
    return grouped_weight_gradient(ones, dpre, rows)[:, 0].contiguous()


def _setup_gate_up(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    hidden, layer, ctx.top_k = inputs
    weight, _, lora_a, lora_b, expert_rows, ctx.scalings, ctx.transposed, *_ = layer
    reads_hidden = any(parameter.requires_grad for parameter in (weight, *lora_a, *lora_b))
    ctx.save_for_backward(*lora_a, *lora_b, hidden if reads_hidden else None, _unless_packed(ctx, layer), *expert_rows)


def _unless_packed(ctx: Any, layer: ExpertLayer) -> torch.Tensor | None:
    """The weight, to be saved; one that is packed is kept aside: as it is no parameter, it would be offloaded."""
    ctx.codes, ctx.statistics, ctx.layout = layer.weight if layer.layout else None, layer.statistics, layer.layout
    return None if layer.layout else layer.weight


def _saved_layer(
    ctx: Any,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    expert_rows: Sequence[torch.Tensor],
) -> ExpertLayer:
    """The layer in its backward, of what `_unless_packed` kept and of what was saved."""
    weight = ctx.codes if weight is None else weight
    given = weight, bias, lora_a, lora_b, expert_rows, ctx.scalings, ctx.transposed
    return ExpertLayer(*given, ctx.statistics, ctx.layout)


def _backward_gate_up(ctx: Any, dpre: torch.Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("moe_experts"))
    lora_a, lora_b, (hidden, weight, *expert_rows) = lora.saved(ctx)
    *needs, need_a, need_b = ctx.needs_input_grad[:5]
    layer = _saved_layer(ctx, weight, None, lora_a, lora_b, expert_rows)
    *gradients, da, db = _gate_up_backward(
        dpre.contiguous(), hidden, layer, ctx.top_k, [*needs, any(need_a), any(need_b)]
    )
    of_adapters = lora.split(da, db, lora_a, lora_b, ctx.scalings, need_a, need_b)
    return input_gradients(ctx, *where_needed(needs, *gradients), *of_adapters)


moe_gate_up.register_autograd(_backward_gate_up, setup_context=_setup_gate_up)


# ---------------------------------------------------------------------------------------------------------------------
# The second layer
# ---------------------------------------------------------------------------------------------------------------------


def _placeholder(
    pre: torch.Tensor,
    top_k_weights: torch.Tensor,
    layer: ExpertLayer,
    form: GatedActivation,
    gated: bool,
) -> torch.Tensor:
    """A placeholder for the block's output, (T, H), whose gradient it turns into those of the operands.

    Its elements share one element of memory.
    """
    return pre.new_zeros(()).expand(top_k_weights.shape[0], layer.widths[0])


moe_down_save = operator("liger_trainer::moe_down_save")(_placeholder)
moe_down_save.register_fake(_placeholder)


@operator("liger_trainer::moe_down")
def moe_down(
    placeholder: torch.Tensor,
    pre: torch.Tensor,
    top_k_weights: torch.Tensor,
    layer: ExpertLayer,
    form: GatedActivation,
    gated: bool,
) -> torch.Tensor:
    """The output (T, H), ``sum over j of w_tj (act(pre_r) @ W_e^T + b_e)``; its gradient goes to `placeholder`."""
    rows, h = layer.rows, activate(pre, form, gated)
    y = layer.product(h, _SECOND, backward=False, extra=lora.forward_term(h, layer.adapters(h.dtype), rows))
    return combine_rows(y, rows, top_k_weights.shape[1], top_k_weights)


@moe_down.register_fake
def _(placeholder, pre, top_k_weights, layer, form, gated):
    return pre.new_empty(placeholder.shape)


pass_to_placeholder(moe_down)


@operator("liger_trainer::moe_down_backward_", mutates=("dpre",))
def _down_backward_(
    dpre: torch.Tensor,
    dout: torch.Tensor,
    pre: torch.Tensor,
    top_k_weights: torch.Tensor,
    layer: ExpertLayer,
    form: GatedActivation,
    gated: bool,
    needs: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Writes the gradient of pre to `dpre`, which may be `pre`.

    Returns those of the routing weights, weight and bias, and those of the adapters' A and B, stacked. `needs` says
    which after that of the routing weights; one that is not needed has no elements.
    """
    need_weight, need_bias, need_a, need_b = needs
    rows, adapters = layer.rows, layer.adapters(pre.dtype)
    bias = layer.bias
    douts, top_k = layer.rows_of_choices(dout, top_k_weights.shape[1])
    term = lora.backward_term(douts, adapters, rows, top_k)
    dh = layer.product(douts, _SECOND, backward=True, top_k=top_k, extra=term)
    dweights, weighted_h = activation_gradients_(
        *(dpre, dh, pre, top_k_weights, rows, form, gated),
        need_h=need_weight or need_a or need_b,
    )
    # The routing weight is part of h here, as dO does not contain it.
    da, db = lora.gradients(adapters, term, douts, weighted_h, rows, top_k, 0, need_a, need_b)
    dweight, dbias = pre.new_empty(0), pre.new_empty(0)
    if need_weight:
        assert weighted_h is not None
        dweight = _weight_gradient(douts, top_k, weighted_h, 0, rows, layer.transposed)
    if bias is not None:
        experts, exists = _experts_of_choices(rows, top_k_weights.shape[1])
        dweights = _plus_gradient_through_bias(dweights, dout, bias, experts, exists)
        if need_bias:
            dbias = _weighted_bias_gradient(dout, top_k_weights, bias, experts, exists)
    return dweights, dweight, dbias, da, db


@_down_backward_.register_fake
def _(dpre, dout, pre, top_k_weights, layer, form, gated, needs):
    weight, bias = layer.weight, layer.bias
    need_weight, need_bias, need_a, need_b = needs
    return (
        torch.empty_like(top_k_weights),
        pre.new_empty(weight.shape if need_weight else 0),
        pre.new_empty(0) if bias is None or not need_bias else bias.new_empty(bias.shape),
        *lora.fake_gradients(pre, layer.lora_a, layer.lora_b, need_a, need_b),
    )


def _experts_of_choices(rows: ExpertRows, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The expert of each choice, (T, k), and whether it is one of this process."""
    num_experts = rows.offsets.shape[0] - 1
    experts = torch.searchsorted(rows.offsets[1:], rows.slots, right=True).clamp(max=num_experts - 1).view(-1, top_k)
    return experts, rows.slots.view(-1, top_k) < rows.offsets[-1]


def _plus_gradient_through_bias(
    dweights: torch.Tensor, dout: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor, exists: torch.Tensor
) -> torch.Tensor:
    """The gradient of the routing weights with what comes through the second bias, which they multiply as well."""
    products = (dout @ bias.T.to(dout.dtype)).gather(1, experts)  # one matmul and k numbers per token, not k rows
    return dweights + torch.where(exists, products, 0.0).to(dweights.dtype)


def _weighted_bias_gradient(
    dout: torch.Tensor, top_k_weights: torch.Tensor, bias: torch.Tensor, experts: torch.Tensor, exists: torch.Tensor
) -> torch.Tensor:
    """The gradient of the second bias: with the weight of each expert in each token, dense (T, E), one matmul."""
    weights = torch.where(exists, top_k_weights, 0.0)
    shares = weights.new_zeros(len(weights), bias.shape[0]).scatter_add_(1, experts, weights)
    return (shares.T.to(dout.dtype) @ dout).to(bias.dtype)


def _setup_down(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    pre, top_k_weights, layer, ctx.form, ctx.gated = inputs
    _, bias, lora_a, lora_b, expert_rows, ctx.scalings, ctx.transposed, *_ = layer
    ctx.save_for_backward(*lora_a, *lora_b, pre, top_k_weights, _unless_packed(ctx, layer), bias, *expert_rows)


def _backward_down(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("moe_experts"))
    lora_a, lora_b, (pre, top_k_weights, weight, bias, *expert_rows) = lora.saved(ctx)
    *needs, need_a, need_b = ctx.needs_input_grad[2:6]
    # If nothing else holds pre, and this backward is the last to read it, the gradient takes its memory. A function
    # that made pre may have saved it, too.
    dpre = torch.empty_like(pre) if graph_is_kept() or ctx.form.activation == IDENTITY else pre.detach()
    layer = _saved_layer(ctx, weight, bias, lora_a, lora_b, expert_rows)
    dweights, *gradients, da, db = _down_backward_(
        *(dpre, dout.contiguous(), pre, top_k_weights, layer, ctx.form, ctx.gated),
        [*needs, any(need_a), any(need_b)],
    )
    of_adapters = lora.split(da, db, lora_a, lora_b, ctx.scalings, need_a, need_b)
    return input_gradients(ctx, dpre, dweights, *where_needed(needs, *gradients), *of_adapters)


moe_down_save.register_autograd(_backward_down, setup_context=_setup_down)
