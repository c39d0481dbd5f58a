"""A gated activation, alone or with its down projection, whose backward recomputes ``h`` instead of saving it.

`glu` and `glu_down` take any row of the table of activations, `kernels/activation.py`; `glu.py` has the public
functions. The kernels, and the operator of a gated activation alone, are in `gated_activation`.

::

    h = act(gate) * up                      y = h @ W^T + b
    dh = dy @ W                             dgate, dup, h = f(dh, gate, up)              dW = dy^T @ h      db = sum dy

A linear layer saves its input h for dW: in bf16 2 bytes per element, next to the 4 of gate and up. Here the elementwise
pass of the backward, which has gate and up in registers, writes h again, over dh. Saved for backward: gate, up and W.

Elements moved per element of h, besides the matmuls: forward 3, backward 6 (three read, three written) instead of 5.
With `inplace_backward` the gradients overwrite gate and up, and dh is all that the backward allocates of the size of h.
A frozen W needs no h, so none is written. The formulas of the activations are in `kernels/activation.py`.

There are two operators, so that a checkpointed layer recomputes only the first. Under torch's non-reentrant checkpoint,
recomputation stops after the last tensor that was saved, and an operator saves after it has run: a single operator
would recompute h and the product for nothing. So the first operator saves and returns a placeholder with the shape of y
but no memory; the second computes y, saves nothing, and passes dy on to the placeholder::

    placeholder = gated_down_save(gate, up, W, b)           dgate, dup, dW, db = its backward, of dy
    y           = gated_down(placeholder, gate, up, W, b)   dy -> placeholder

Shapes: gate, up and h (..., intermediate), W (hidden, intermediate), y (..., hidden).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.activation import Activation, GatedActivation
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
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast, is_expanded, reference_of, use_triton


def _placeholder(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    form: GatedActivation,
    inplace_backward: bool,
    fp8: str | None,
) -> torch.Tensor:
    """A placeholder for y that turns its gradient into those of the operands. Call `glu_down`.

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


def glu(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: Activation,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """``act(gate) * up``; with `up` None, `gate` is a whole fused projection. The options are those of `swiglu`."""
    if kernel_takes(gate, up, inplace_backward):
        form = GatedActivation.of(activation.name, gate_multiplier, down_multiplier, limit)
        return gated.gated_activation(gate, up, form, inplace_backward)
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    h = activation.value(gate if gate_multiplier == 1.0 else gate * gate_multiplier) * up
    return h if down_multiplier == 1.0 else h * down_multiplier


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
        h = glu_reference(
            gate, up, activation, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier, limit=limit
        )
        return F.linear(h, weight, bias) if fp8 is None else fp8_linear(h, weight, bias, fp8)
    if fp8 is not None and not takes_fp8(gate, weight):
        fp8 = None
    form = GatedActivation.of(activation.name, gate_multiplier, down_multiplier, limit)
    placeholder = gated_down_save(gate, up, weight, bias, form, inplace_backward, fp8)
    return gated_down(placeholder, gate, up, weight, bias, form, fp8)


def kernel_takes(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    inplace_backward: bool,
    *,
    interleaved: bool = False,
    weight_shape: Sequence[int] | None = None,
    bias: torch.Tensor | None = None,
) -> bool:
    """Checks the arguments of a gated activation, and returns whether the kernel runs rather than the reference.

    With `up` None, `gate` is a whole fused projection, whose columns may be `interleaved`. `weight_shape` and `bias`
    are of a down projection that follows.

    Raises:
        ValueError: If shapes or devices do not fit, the last dimension of a fused projection is odd, or the backward
            would overwrite memory that two elements share.
    """
    intermediate = gate.shape[-1] if gate.dim() else 0
    takes = use_triton(gate)
    if up is None:
        if gate.dim() == 0 or intermediate % 2:
            raise ValueError(
                f"`gate_up` is {tuple(gate.shape)}; its last dimension must be twice the intermediate size, "
                + ("gate and up alternating." if interleaved else "gate first, then up.")
            )
        if inplace_backward and is_expanded(gate):
            raise ValueError("`inplace_backward=True` writes a gradient over `gate_up`, but it is expanded.")
        intermediate //= 2
    else:
        if gate.shape != up.shape or gate.dim() == 0:
            raise ValueError(
                f"`gate` is {tuple(gate.shape)} and `up` is {tuple(up.shape)}; they must have the same shape, "
                "(..., intermediate)."
            )
        if gate.device != up.device:
            raise ValueError(f"`gate` is on {gate.device} and `up` on {up.device}; they must be on one device.")
        # A compiled graph gives every mutated tensor memory of its own, and has no storages to compare.
        compared = inplace_backward and not torch.compiler.is_compiling()
        shared = compared and gate.untyped_storage()._cdata == up.untyped_storage()._cdata
        if shared or (inplace_backward and (is_expanded(gate) or is_expanded(up))):
            raise ValueError(
                "`inplace_backward=True` writes gradients over `gate` and `up`, but they share memory or are expanded; "
                "give each its own memory, pass a fused projection to the fused function, or turn `inplace_backward` "
                "off."
            )
        takes = takes and gate.dtype == up.dtype
    if weight_shape is not None and (len(weight_shape) != 2 or weight_shape[1] != intermediate):
        raise ValueError(f"`weight` is {tuple(weight_shape)}; it must be (hidden, {intermediate}).")
    if weight_shape is not None and bias is not None and bias.shape != weight_shape[:1]:
        raise ValueError(f"`bias` is {tuple(bias.shape)}; it must be ({weight_shape[0]},).")
    return takes


glu_reference = reference_of(glu, "kernel_takes")
glu_down_reference = reference_of(glu_down, "kernel_takes")
