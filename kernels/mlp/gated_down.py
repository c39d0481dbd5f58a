"""A gated activation and its down projection, which recompute ``h`` in the backward instead of saving it.

::

    h = act(gate) * up                      y = h @ W^T + b
    dh = dy @ W                             dgate, dup, h = f(dh, gate, up)              dW = dy^T @ h      db = sum dy

A linear layer saves its input h for dW: in bf16 2 bytes per element, next to the 4 of gate and up. Here the elementwise
pass of the backward, which has gate and up in registers, writes h again, over dh. Saved for backward: gate, up and W.

Elements moved per element of h, besides the matmuls: forward 3, backward 6 (three read, three written) instead of 5.
With `inplace_backward` the gradients overwrite gate and up, and dh is all that the backward allocates of the size of h.
A frozen W needs no h, so none is written. The formulas of the activations are in `gated_activation`.

There are two operators, so that a checkpointed layer recomputes only the first. Under torch's non-reentrant checkpoint,
recomputation stops after the last tensor that was saved, and an operator saves after it has run: a single operator
would recompute h and the product for nothing. So the first operator saves and returns a placeholder with the shape of y
but no memory; the second computes y, saves nothing, and passes dy on to the placeholder::

    placeholder = gated_down_save(gate, up, W, b)           dgate, dup, dW, db = its backward, of dy
    y           = gated_down(placeholder, gate, up, W, b)   dy -> placeholder

Shapes: gate, up and h (..., intermediate), W (hidden, intermediate), y (..., hidden).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.activation import SILU, Activation, GatedActivation
from liger_trainer.kernels.autograd import input_gradients, pass_to_placeholder, second_derivative_message
from liger_trainer.kernels.fp8.linear import (
    fp8_linear,
    input_gradient,
    largest_of_gradient,
    product,
    product_of_cast,
    takes_fp8,
    weight_gradient,
)
from liger_trainer.kernels.fp8.modes import Fp8Mode, Scaling, products_of
from liger_trainer.kernels.fp8.shared_cast import drop
from liger_trainer.kernels.mlp import gated_activation as gated
from liger_trainer.kernels.mlp.glu import gelu_of, glu_reference, kernel_takes
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast


def _placeholder(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: GatedActivation,
    inplace_backward: bool,
    fp8: str | None,
) -> torch.Tensor:
    """A placeholder for y that turns its gradient into those of the operands. Call `swiglu_down` or `geglu_down`.

    `up` is None if `gate` is a whole fused projection.
    """
    return output_placeholder(gate, weight.shape[0])


gated_down_save = operator("liger_trainer::gated_down_save")(_placeholder)
gated_down_save.register_fake(_placeholder)


def output_placeholder(gate: torch.Tensor, out_features: int) -> torch.Tensor:
    """Zeros of the shape of y that share one element of memory."""
    return gate.new_zeros(()).expand(*gate.shape[:-1], out_features)


@operator("liger_trainer::gated_down")
def gated_down(
    placeholder: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: GatedActivation,
    fp8: str | None,
) -> torch.Tensor:
    """``h @ weight.T + bias``, whose gradient goes to `placeholder`."""
    if fp8 is not None:
        drop()  # the cast of what gate and up were computed from
        if products_of(fp8).output[0] is Scaling.ROWS:
            cast = gated.cast_of_h(gate, up, form)
            return product_of_cast(cast, weight, bias, fp8).view(placeholder.shape)
    h = gated.empty_h(gate, up)
    gated.launch_forward(gate, up, h, form)
    if fp8 is not None:
        return product(h, weight, bias, fp8, shares=False)
    return F.linear(h, weight, bias)


@gated_down.register_fake
def _(placeholder, gate, up, weight, bias, form, fp8):
    return gate.new_empty(placeholder.shape)


pass_to_placeholder(gated_down)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, weight, _, ctx.form, ctx.inplace_backward, ctx.fp8 = inputs
    ctx.save_for_backward(gate, up, weight)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("swiglu_down and geglu_down"))
    need_gate, need_up, need_weight, need_bias = ctx.needs_input_grad[:4]
    gate, up, weight = ctx.saved_tensors
    if ctx.fp8 is not None:
        drop()  # of a layer that has been recomputed
    dy = gated.rows_of(dy)
    dgate = dup = h = dweight = None
    with torch.autocast(gate.device.type, enabled=False):
        largest = None if ctx.fp8 is None else largest_of_gradient(dy, ctx.fp8)
        if need_gate or need_up:
            dh = dy @ weight if ctx.fp8 is None else input_gradient(dy, weight, ctx.fp8, largest)
            dgate, dup, h = gradients_and_h(ctx, dh, gate, up, need_gate, need_up, need_weight)
        elif need_weight:
            h = gated.rows_of(gated.gated_activation(gate, up, ctx.form, False))
        if need_weight and h is not None:
            dweight = dy.mT @ h if ctx.fp8 is None else weight_gradient(dy, h, ctx.fp8, largest)
    return input_gradients(ctx, dgate, dup, dweight, dy.sum(0) if need_bias else None)


def gradients_and_h(
    ctx: Any,
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    need_gate: bool,
    need_up: bool,
    need_h: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """The gradients of gate and up, None where not needed, and the memory of dh, with h in it if it is needed.

    `ctx.form` and `ctx.inplace_backward` are arguments of the operator.
    """
    dgate = gate.detach() if need_gate else None
    dup = up.detach() if up is not None and need_up else None
    if not gated.overwrites_gate_and_up(ctx, up):
        dgate, dup = (None if x is None else x.new_empty(x.shape) for x in (dgate, dup))
    gated.gated_activation_backward_(dh, gate, up, dgate, dup, dh if need_h else None, ctx.form)
    return dgate, dup, dh


gated_down_save.register_autograd(_backward, setup_context=_setup_context)


def glu_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    inplace_backward: bool = False,
    fp8: Fp8Mode | None = None,
) -> torch.Tensor:
    """`swiglu_down` with any row of the table of activations."""
    gate, up, weight, bias = as_autocast(gate), as_autocast(up), as_autocast(weight), as_autocast(bias)
    if not kernel_takes(gate, up, inplace_backward, weight_shape=weight.shape, bias=bias):
        h = glu_reference(gate, up, activation, gate_multiplier, down_multiplier, limit)
        return F.linear(h, weight, bias) if fp8 is None else fp8_linear(h, weight, bias, fp8)
    if fp8 is not None and not takes_fp8(gate, weight):
        fp8 = None
    form = GatedActivation.of(activation.name, gate_multiplier, down_multiplier, limit)
    placeholder = gated_down_save(gate, up, weight, bias, form, inplace_backward, fp8)
    return gated_down(placeholder, gate, up, weight, bias, form, fp8)


def swiglu_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    inplace_backward: bool = False,
    fp8: Fp8Mode | None = None,
) -> torch.Tensor:
    """``linear(swiglu(gate, up), weight, bias)`` that recomputes the product in its backward instead of saving it.

    This saves a third of what a gated MLP holds between forward and backward, for one more store per element in the
    backward. In a layer that is checkpointed as a whole, it saves the recomputation of the matmul instead.

    Args:
        gate: Gate projection, (..., intermediate), or, with `up` None, a whole fused projection, (..., 2 *
            intermediate), gate first; as for `swiglu` otherwise.
        up: Up projection, shaped as `gate`, or None.
        weight: Weight of the down projection, (hidden, intermediate), in the dtype of `gate`; under autocast all inputs
            are cast as for a linear layer. For a frozen weight, neither its gradient nor h is computed.
        bias: (hidden,), or None.
        gate_multiplier: See `swiglu`.
        down_multiplier: See `swiglu`; it does not multiply the bias.
        limit: See `swiglu`.
        inplace_backward: Lets the backward write the gradients over `gate` and `up`; see `swiglu`.
        fp8: The mode in which to multiply in fp8, as `fp8_linear`; None for the dtype of `gate`.

    Returns:
        (..., hidden), in `gate`'s dtype.

    Raises:
        ValueError: If shapes or devices do not fit, or `inplace_backward` is set while `gate` and `up` share memory.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    return glu_down(
        *(gate, up, weight, bias, SILU),
        gate_multiplier=gate_multiplier,
        down_multiplier=down_multiplier,
        limit=limit,
        inplace_backward=inplace_backward,
        fp8=fp8,
    )


def geglu_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: str = "tanh",
    *,
    inplace_backward: bool = False,
    fp8: Fp8Mode | None = None,
) -> torch.Tensor:
    """``linear(geglu(gate, up), weight, bias)`` that recomputes the product in its backward; see `swiglu_down`.

    Args:
        gate: See `swiglu_down`.
        up: See `swiglu_down`.
        weight: See `swiglu_down`.
        bias: (hidden,), or None.
        approximate: ``"tanh"`` or ``"none"``; see `geglu`.
        inplace_backward: See `swiglu`.
        fp8: See `swiglu_down`.

    Returns:
        (..., hidden), in `gate`'s dtype.

    Raises:
        ValueError: As `swiglu_down`, and if `approximate` is neither of the two.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    return glu_down(gate, up, weight, bias, gelu_of(approximate), inplace_backward=inplace_backward, fp8=fp8)


def swiglu_down_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    fp8: Fp8Mode | None = None,
) -> torch.Tensor:
    """`swiglu_down` in plain torch, which saves the product."""
    h = glu_reference(gate, up, SILU, gate_multiplier, down_multiplier, limit)
    return F.linear(h, weight, bias) if fp8 is None else fp8_linear(h, weight, bias, fp8)


def geglu_down_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: str = "tanh",
    fp8: Fp8Mode | None = None,
) -> torch.Tensor:
    """`geglu_down` in plain torch, which saves the product."""
    h = glu_reference(gate, up, gelu_of(approximate))
    return F.linear(h, weight, bias) if fp8 is None else fp8_linear(h, weight, bias, fp8)
