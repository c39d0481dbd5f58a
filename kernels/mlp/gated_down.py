"""A gated activation and its down projection, which keep ``h`` for neither: it is built again.

::

    h = act(gate) * up                      y = h @ W^T + b
    dh = dy @ W                             dgate, dup, h = f(dh, gate, up)              dW = dy^T @ h      db = sum dy

A linear layer saves its input h for dW: 2 bytes an element beside the 4 of gate and up in bf16. Here the elementwise
pass of the backward, which has gate and up in registers, writes h once more, over dh. Saved: gate, up and W.

Bytes moved beyond the matrix products: forward 3 elements, backward 6 (three read, three written) instead of 5. With
`inplace_backward` the gradients go over gate and up, and the backward allocates nothing of h's size but dh. A frozen W
needs no h, so none is written. Formulas of the activations are in `_gated_activation`.

There are two operators, so that a checkpoint repeats only the first. Under torch's non-reentrant checkpoints a
recomputation ends with the last tensor that was saved, and an operator saves when it has run: as one, h and the product
would be computed again for nobody. So the first saves, and returns a stand-in for y that has y's shape and no memory;
the second computes y, saves nothing, and hands dy to the stand-in::

    stand_in = gated_down_save(gate, up, W, b)              dgate, dup, dW, db = its backward, of dy
    y        = gated_down(stand_in, gate, up, W, b)         dy -> stand_in
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
from liger_trainer.kernels.mlp.gated_kernels import launch_backward, launch_forward, rows_of
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
    """Stands in for y, whose gradient it turns into those of the operands; call `swiglu_down` or one of its kin.

    `up` is None where `gate` is a whole fused projection.
    """
    return stand_in_for(gate, weight.shape[0])


@gated_down_save.register_fake
def _(gate, up, weight, *_):
    return stand_in_for(gate, weight.shape[0])


def stand_in_for(gate: torch.Tensor, out_features: int) -> torch.Tensor:
    """Zeros of y's shape that share one element of memory."""
    return gate.new_zeros(()).expand(*gate.shape[:-1], out_features)


@torch.library.custom_op("liger_trainer::gated_down", mutates_args=())
def gated_down(
    stand_in: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
) -> torch.Tensor:
    """``h @ weight.T + bias``, whose gradient goes to `stand_in`."""
    h = gated.empty_h(gate, up)
    if h.numel():
        launch_forward(gate, up, h, activation, scalars, interleaved)
    with torch.autocast(gate.device.type, enabled=False):
        return F.linear(h, weight, bias)


@gated_down.register_fake
def _(stand_in, gate, *_):
    return gate.new_empty(stand_in.shape)


def _hand_over(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return dy, *(None,) * 7


gated_down.register_autograd(_hand_over)


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
        results = dgate if need_gate else None, dup if need_up else None, dh
        launch_backward(dh, gate, up, *results, activation, scalars, interleaved)
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
    gate, up, weight, _, *ctx.options, ctx.inplace_backward = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate, up, weight)


def _backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 8
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
            h = rows_of(gated.gated_activation(gate, up, *ctx.options, False))
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
    """The gradients of gate and up that are needed and, in the memory of dh, h where it is."""
    if gated.overwrites_saved(ctx) and need_gate and (need_up or up is None):
        dgate, dup = gate.detach(), None if up is None else up.detach()
        operator = _gated_recompute_ if need_h else gated.gated_activation_backward_
        operator(dh, dgate, dup, *ctx.options)
    else:
        operator = _gated_recompute if need_h else gated.gated_activation_backward
        dgate, dup = operator(dh, gate, up, *ctx.options, need_gate, need_up)
    return dgate if need_gate else None, dup if need_up else None, dh


gated_down_save.register_autograd(_backward, setup_context=_setup_context)


def kernel_takes(
    gate: torch.Tensor, up: torch.Tensor | None, weight: Weight, bias: torch.Tensor | None, inplace: bool
) -> bool:
    """Checks the inputs; whether the kernel takes them, or the reference must."""
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
    """``linear(swiglu(gate, up), weight, bias)`` that does not keep the product for its backward but builds it again.

    It saves a third of what a gated MLP holds between forward and backward, for one more store an element in the
    backward. Inside a layer that is checkpointed as a whole nothing of it outlives the layer's own backward, but its
    recomputation leaves the product out.

    Args:
        gate: Gate projection, (..., intermediate), or, with `up` None, a whole fused projection, (..., 2 *
            intermediate), gate first; as for `swiglu` otherwise.
        up: Up projection, shaped as `gate`, or None.
        weight: Of the down projection, (hidden, intermediate), in `gate`'s dtype; under autocast all inputs are cast as
            a linear layer's are. A frozen one costs nothing: neither its gradient nor h is made.
        bias: (hidden,), or None.
        gate_multiplier: See `swiglu`.
        down_multiplier: See `swiglu`; it does not multiply the bias.
        limit: See `swiglu`.
        inplace_backward: Let the backward write the gradients over `gate` and `up`; see `swiglu`.

    Returns:
        (..., hidden), in `gate`'s dtype.

    Raises:
        ValueError: If shapes or devices do not fit, or `inplace_backward` is asked for while `gate` and `up` share
            memory.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    gate, up, weight, bias = as_autocast(gate), as_autocast(up), as_autocast(weight), as_autocast(bias)
    if kernel_takes(gate, up, weight, bias, inplace_backward):
        values = gated.scalars(gate_multiplier, down_multiplier, limit)
        return _operators(gate, up, weight, bias, "silu", values, inplace_backward)
    return swiglu_down_reference(
        *(gate, up, weight, bias),
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
    """``linear(geglu(gate, up), weight, bias)`` that does not keep the product; see `swiglu_down`.

    Args:
        gate: See `swiglu_down`, as all arguments that are not named here.
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
    operands = gate, up, weight, bias, activation, scalars, False
    return gated_down(gated_down_save(*operands, inplace_backward), *operands)


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
    """`swiglu_down` in plain torch, which keeps the product."""
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
    """`geglu_down` in plain torch, which keeps the product."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return F.linear(geglu_reference(gate, up, approximate), weight, bias)
