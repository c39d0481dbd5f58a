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
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.autocast import as_autocast
from liger_trainer.kernels.autograd import second_derivative_message
from liger_trainer.kernels.lora.nf4 import Weight
from liger_trainer.kernels.mlp import gated_activation as gated
from liger_trainer.kernels.mlp.gated_activation import launch_backward, launch_forward, rows_of
from liger_trainer.kernels.mlp.geglu import activation_name, geglu_reference
from liger_trainer.kernels.mlp.swiglu import swiglu_reference


@torch.library.custom_op("liger_trainer::gated_down_save", mutates_args=())
def gated_down_save(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
    inplace_backward: bool,
) -> torch.Tensor:
    """A placeholder for y that turns its gradient into those of the operands. Call `swiglu_down` or `geglu_down`.

    `up` is None if `gate` is a whole fused projection.
    """
    return output_placeholder(gate, weight.shape[0])


@gated_down_save.register_fake
def _(gate, up, weight, bias, activation, scalars, interleaved, inplace_backward):
    return output_placeholder(gate, weight.shape[0])


def output_placeholder(gate: torch.Tensor, out_features: int) -> torch.Tensor:
    """Zeros of the shape of y that share one element of memory."""
    return gate.new_zeros(()).expand(*gate.shape[:-1], out_features)


@torch.library.custom_op("liger_trainer::gated_down", mutates_args=())
def gated_down(
    placeholder: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
) -> torch.Tensor:
    """``h @ weight.T + bias``, whose gradient goes to `placeholder`."""
    h = gated.empty_h(gate, up)
    if h.numel():
        launch_forward(gate, up, h, activation, scalars, interleaved)
    with torch.autocast(gate.device.type, enabled=False):
        return F.linear(h, weight, bias)


@gated_down.register_fake
def _(placeholder, gate, up, weight, bias, activation, scalars, interleaved):
    return gate.new_empty(placeholder.shape)


def _pass_on(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return dy, None, None, None, None, None, None, None


gated_down.register_autograd(_pass_on)


@torch.library.custom_op("liger_trainer::gated_recompute", mutates_args=("dh",))
def _gated_recompute(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
    need_gate: bool,
    need_up: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of gate and up, and overwrites dh with h."""
    dgate, dup = gated.empty(gate, gate, need_gate), gated.empty(up, gate, need_up)
    if gate.numel():
        dgate_or_none, dup_or_none = dgate if need_gate else None, dup if need_up else None
        launch_backward(dh, gate, up, dgate_or_none, dup_or_none, dh, activation, scalars, interleaved)
    return dgate, dup


@_gated_recompute.register_fake
def _(dh, gate, up, activation, scalars, interleaved, need_gate, need_up):
    return gated.empty(gate, gate, need_gate), gated.empty(up, gate, need_up)


@torch.library.custom_op("liger_trainer::gated_recompute_", mutates_args=("dh", "gate", "up"))
def _gated_recompute_(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
) -> None:
    """Overwrites gate and up with their gradients, and dh with h."""
    gated.write_over(
        gate,
        up,
        lambda dgate, dup: launch_backward(dh, dgate, dup, dgate, dup, dh, activation, scalars, interleaved),
    )


@_gated_recompute_.register_fake
def _(dh, gate, up, activation, scalars, interleaved):
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, weight, _, activation, scalars, interleaved, ctx.inplace_backward = inputs
    ctx.options = activation, scalars, interleaved
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate, up, weight)


def _backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return None, None, None, None, None, None, None, None
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("swiglu_down and geglu_down"))
    need_gate, need_up, need_weight, need_bias = ctx.needs_input_grad[:4]
    gate, up, weight = ctx.saved_tensors
    dy = rows_of(dy)
    dgate = dup = h = None
    with torch.autocast(gate.device.type, enabled=False):
        if need_gate or need_up:
            dgate, dup, h = gradients_and_h(ctx, dy @ weight, gate, up, need_gate, need_up, need_weight)
        elif need_weight:
            activation, scalars, interleaved = ctx.options
            h = rows_of(gated.gated_activation(gate, up, activation, scalars, interleaved, False))
        dweight = dy.mT @ h if need_weight and h is not None else None
    return dgate, dup, dweight, dy.sum(0) if need_bias else None, None, None, None, None


def gradients_and_h(
    ctx: Any,
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    need_gate: bool,
    need_up: bool,
    need_h: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of gate and up, None where not needed, and the memory of dh, with h in it if it is needed.

    `ctx.options` are the activation, scalars and interleaved of the operator; `ctx.inplace_backward` is its argument.
    """
    activation, scalars, interleaved = ctx.options
    if gated.overwrites_saved(ctx) and need_gate and (need_up or up is None):
        dgate, dup = gate.detach(), None if up is None else up.detach()
        operator = _gated_recompute_ if need_h else gated.gated_activation_backward_
        operator(dh, dgate, dup, activation, scalars, interleaved)
    else:
        operator = _gated_recompute if need_h else gated.gated_activation_backward
        dgate, dup = operator(dh, gate, up, activation, scalars, interleaved, need_gate, need_up)
    return dgate if need_gate else None, dup if need_up else None, dh


gated_down_save.register_autograd(_backward, setup_context=_setup_context)


def kernel_takes(
    gate: torch.Tensor, up: torch.Tensor | None, weight: Weight, bias: torch.Tensor | None, inplace: bool
) -> bool:
    """Checks the arguments, and returns whether the kernel runs rather than the reference."""
    takes = gated.fused_kernel_takes(gate, inplace) if up is None else gated.kernel_takes(gate, up, inplace)
    intermediate = gate.shape[-1] // (2 if up is None else 1)
    if len(weight.shape) != 2 or weight.shape[1] != intermediate:
        raise ValueError(f"`weight` is {tuple(weight.shape)}; it must be (hidden, {intermediate}).")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"`bias` is {tuple(bias.shape)}; it must be ({weight.shape[0]},).")
    return takes


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

    Returns:
        (..., hidden), in `gate`'s dtype.

    Raises:
        ValueError: If shapes or devices do not fit, or `inplace_backward` is set while `gate` and `up` share memory.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    gate, up, weight, bias = as_autocast(gate), as_autocast(up), as_autocast(weight), as_autocast(bias)
    if kernel_takes(gate, up, weight, bias, inplace_backward):
        values = gated.scalars(gate_multiplier, down_multiplier, limit)
        return _operators(gate, up, weight, bias, "silu", values, inplace_backward)
    return swiglu_down_reference(
        gate,
        up,
        weight,
        bias,
        gate_multiplier=gate_multiplier,
        down_multiplier=down_multiplier,
        limit=limit,
    )


def geglu_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: str = "tanh",
    *,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """``linear(geglu(gate, up), weight, bias)`` that recomputes the product in its backward; see `swiglu_down`.

    Args:
        gate: See `swiglu_down`.
        up: See `swiglu_down`.
        weight: See `swiglu_down`.
        bias: (hidden,), or None.
        approximate: ``"tanh"`` or ``"none"``; see `geglu`.
        inplace_backward: See `swiglu`.

    Returns:
        (..., hidden), in `gate`'s dtype.

    Raises:
        ValueError: As `swiglu_down`, and if `approximate` is neither of the two.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    activation = activation_name(approximate)
    gate, up, weight, bias = as_autocast(gate), as_autocast(up), as_autocast(weight), as_autocast(bias)
    if kernel_takes(gate, up, weight, bias, inplace_backward):
        return _operators(gate, up, weight, bias, activation, gated.scalars(), inplace_backward)
    return geglu_down_reference(gate, up, weight, bias, approximate)


def _operators(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    inplace_backward: bool,
) -> torch.Tensor:
    placeholder = gated_down_save(gate, up, weight, bias, activation, scalars, False, inplace_backward)
    return gated_down(placeholder, gate, up, weight, bias, activation, scalars, False)


def swiglu_down_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate_multiplier: float = 1.0,
    down_multiplier: float = 1.0,
    limit: float | None = None,
) -> torch.Tensor:
    """`swiglu_down` in plain torch, which saves the product."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    h = swiglu_reference(gate, up, gate_multiplier=gate_multiplier, down_multiplier=down_multiplier, limit=limit)
    return F.linear(h, weight, bias)


def geglu_down_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: str = "tanh",
) -> torch.Tensor:
    """`geglu_down` in plain torch, which saves the product."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return F.linear(geglu_reference(gate, up, approximate), weight, bias)
