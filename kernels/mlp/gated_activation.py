"""The operators under SwiGLU and GeGLU, ``h = act(gate) * up``, with their scales and clamps.

With ``g`` the gate, ``u`` the up projection and ``dh`` the gradient of ``h``::

    h  = round(act(a g)) * (u + o) * d      dg = d dh (u + o) a act'(a g)       du = d dh act(a g)

    silu:       act(x) = x * s(x)         act'(x) = s + x * s * (1 - s),                        s the logistic sigmoid
    gelu_tanh:  act(x) = x * s(2z)        act'(x) = s + x * s * (1 - s) * 2 dz/dx,              s = s(2z)
                                          z = sqrt(2/pi) * (x + 0.044715 x^3);  0.5 * (1 + tanh z) = s(2z)
    gelu:       act(x) = x * Phi(x)       act'(x) = Phi + x * phi(x),                           of the standard normal

`a` and `d` are the gate's and the down projection's multiplier and `o` an offset of up (1, 1 and 0 as a rule). With a
limit `l`, `g` is first clamped from above and `u` from both sides; where that changed a value its gradient is 0.

The forward rounds the activation to the inputs' dtype before the product, as a model that calls its activation on its
own does, so that the result is the model's, bit for bit but for the last place of exp and erf.

Bytes moved: forward 3 elements (two read, one written), backward 5 (three read, two written). Saved for backward: gate
and up; the activation is computed again. Tensors that are contiguous are walked as one flat array; halves of a fused
projection, by row, and their gradient is written into the two halves of one tensor, so that nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.mlp.gated_kernels import launch_backward, launch_forward, rows_of
from liger_trainer.kernels.runtime import graph_is_kept, is_expanded, use_triton

FUNCTIONS = "a gated activation (swiglu, geglu, clamped_swiglu)"


def scalars(
    gate_multiplier: float = 1.0, down_multiplier: float = 1.0, limit: float | None = None, up_offset: float = 0.0
) -> list[float]:
    """``a, d, l, o`` of the formula, as the operators take them."""
    return [float(gate_multiplier), float(down_multiplier), math.inf if limit is None else float(limit), up_offset]


def empty_h(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """Memory for h."""
    return gate.new_empty(gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2))


def empty(x: torch.Tensor | None, like: torch.Tensor, needed: bool) -> torch.Tensor:
    """Memory for the gradient of `x`, or a tensor without elements where none is needed."""
    return like.new_empty(x.shape if needed and x is not None else (0,))


@torch.library.custom_op("liger_trainer::gated_activation", mutates_args=())
def gated_activation(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
    inplace_backward: bool,
) -> torch.Tensor:
    """``act(gate) * up`` as an operator; call `swiglu` or one of its kin, which check their inputs.

    Here and in the backward `up` is None where `gate` is a whole fused projection: its halves, or interleaved columns.
    """
    h = empty_h(gate, up)
    if h.numel():
        launch_forward(gate, up, h, activation, scalars, interleaved)
    return h


@gated_activation.register_fake
def _(gate, up, activation, scalars, interleaved, inplace_backward):
    return empty_h(gate, up)


@torch.library.custom_op("liger_trainer::gated_activation_backward", mutates_args=())
def gated_activation_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
    need_gate: bool,
    need_up: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up; one that is not needed has no elements."""
    dgate, dup = empty(gate, gate, need_gate), empty(up, gate, need_up)
    if gate.numel():
        results = dgate if need_gate else None, dup if need_up else None, None
        launch_backward(dh, gate, up, *results, activation, scalars, interleaved)
    return dgate, dup


@gated_activation_backward.register_fake
def _(dh, gate, up, activation, scalars, interleaved, need_gate, need_up):
    return empty(gate, gate, need_gate), empty(up, gate, need_up)


refuse_second_derivative(gated_activation_backward, FUNCTIONS)


@torch.library.custom_op("liger_trainer::gated_activation_backward_", mutates_args=("gate", "up"))
def gated_activation_backward_(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
    interleaved: bool,
) -> None:
    """Overwrites gate and up with their gradients."""
    write_over(
        gate, up, lambda dgate, dup: launch_backward(dh, dgate, dup, dgate, dup, None, activation, scalars, interleaved)
    )


@gated_activation_backward_.register_fake
def _(dh, gate, up, activation, scalars, interleaved):
    return None


def write_over(gate: torch.Tensor, up: torch.Tensor | None, launch: Any) -> None:
    """Calls `launch` with rows of gate and up that it overwrites; also where strides give no view of the rows."""
    if gate.numel() == 0:
        return
    rows = [None if x is None else rows_of(x) for x in (gate, up)]
    launch(*rows)
    for x, gradient in zip((gate, up), rows):
        if x is not None and gradient is not None and gradient.data_ptr() != x.data_ptr():
            x.copy_(gradient.view(x.shape))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, *ctx.options, ctx.inplace_backward = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate, up)


def overwrites_saved(ctx: Any) -> bool:
    """Whether the running backward writes gradients over gate and up."""
    # Not while another backward may follow, nor in one that is itself recorded. A second backward that could not be
    # foreseen would fail in autograd's own check of saved tensors.
    return ctx.inplace_backward and not torch.is_grad_enabled() and not graph_is_kept()


def _backward(ctx: Any, dh: torch.Tensor | None) -> tuple[Any, ...]:
    need_gate, need_up = ctx.needs_input_grad[:2]
    if dh is None:
        return (None,) * 6
    gate, up = ctx.saved_tensors
    if overwrites_saved(ctx) and need_gate and (need_up or up is None):
        dgate, dup = gate.detach(), None if up is None else up.detach()
        gated_activation_backward_(dh, dgate, dup, *ctx.options)
    else:
        dgate, dup = gated_activation_backward(dh, gate, up, *ctx.options, need_gate, need_up)
    return dgate if need_gate else None, dup if need_up else None, None, None, None, None


gated_activation.register_autograd(_backward, setup_context=_setup_context)


def _has_memory_of_its_own(gate: torch.Tensor, up: torch.Tensor) -> bool:
    if is_expanded(gate) or is_expanded(up):
        return False
    # A compiled graph gives every mutated tensor memory of its own, and cannot ask for storages.
    return torch.compiler.is_compiling() or gate.untyped_storage()._cdata != up.untyped_storage()._cdata


def kernel_takes(gate: torch.Tensor, up: torch.Tensor, inplace_backward: bool) -> bool:
    """Checks the inputs of a gated activation; whether its kernel takes them, or its reference must.

    Raises:
        ValueError: If shapes or devices differ, or the backward is to overwrite memory that two elements share.
    """
    if gate.shape != up.shape or gate.dim() == 0:
        raise ValueError(
            f"`gate` is {tuple(gate.shape)} and `up` is {tuple(up.shape)}; they must have one shape, "
            "(..., intermediate)."
        )
    if gate.device != up.device:
        raise ValueError(f"`gate` is on {gate.device} and `up` on {up.device}; they must be on one device.")
    if inplace_backward and not _has_memory_of_its_own(gate, up):
        raise ValueError(
            "`inplace_backward=True` writes gradients over `gate` and `up`, but they share memory or are expanded; "
            "give each its own, pass a fused projection to the fused function, or leave `inplace_backward` off."
        )
    return use_triton(gate) and gate.dtype == up.dtype


def fused_kernel_takes(gate_up: torch.Tensor, inplace_backward: bool, interleaved: bool = False) -> bool:
    """Checks the input of a fused gated activation; whether its kernel takes it, or its reference must.

    Raises:
        ValueError: If the last dimension cannot be halved, or the backward is to overwrite an expanded tensor.
    """
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise ValueError(
            f"`gate_up` is {tuple(gate_up.shape)}; its last dimension must be twice the intermediate size, "
            + ("gate and up in turns." if interleaved else "gate first, then up.")
        )
    if inplace_backward and is_expanded(gate_up):
        raise ValueError("`inplace_backward=True` writes a gradient over `gate_up`, but it is expanded.")
    return use_triton(gate_up)
