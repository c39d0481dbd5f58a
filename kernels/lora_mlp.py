"""A gated MLP whose projections have low-rank adapters, which does not keep the product behind its activation.

::

    gate, up = two layers of x (`lora`)            h = act(gate) * up            y = h @ W^T + b + s (h @ A^T) @ B^T

Of the down projection's gradients only dA (and dW, where W is trained) needs h, which the elementwise pass of the
backward builds again over dh, as in `gated_down`. Kept between forward and backward: x, gate, up and a few columns for
each adapter. Eager code keeps, beside these, act(gate), h, and x and h once more in the adapters' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels import _gated_activation as gated
from liger_trainer.kernels import _lora_products as products
from liger_trainer.kernels._autograd import second_derivative_message
from liger_trainer.kernels._base_weights import flat_weights, weights_of
from liger_trainer.kernels._gated_kernels import launch_forward
from liger_trainer.kernels._lora_linears import split_rows
from liger_trainer.kernels._lora_products import rows_of
from liger_trainer.kernels.gated_down import gradients_and_h, kernel_takes
from liger_trainer.kernels.geglu import activation_name, geglu, geglu_fused, geglu_reference
from liger_trainer.kernels.lora import LoRALayer, as_autocast, lora_linears, lora_linears_reference
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused, swiglu_reference


@torch.library.custom_op("liger_trainer::gated_lora_down", mutates_args=())
def gated_lora_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    layouts: Sequence[int],
    scalings: Sequence[float],
    masked: Sequence[bool],
    activation: str,
    scalars: Sequence[float],
    inplace_backward: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Y and z of the down projection, as an operator; call `lora_down`, which checks its inputs.

    `up` is None where `gate` is a whole fused projection; `statistics` and `layouts` are of a weight in 4 bits.
    """
    (base,) = weights_of([weight], statistics, layouts)
    h = gated.empty_h(gate, up)
    if h.numel():
        launch_forward(gate, up, h, activation, scalars, False)
    adapters = _adapters(lora_a, lora_b, masks, scalings, masked)
    with torch.autocast(gate.device.type, enabled=False):
        rows = rows_of(h)
        z = products.project_down(rows, adapters)
        y = products.project(rows, base, bias, z, adapters)
    return y.view(*gate.shape[:-1], base.shape[0]), z


@gated_lora_down.register_fake
def _(gate, up, weight, bias, lora_a, lora_b, masks, statistics, layouts, *_):
    tokens, rank = gate.numel() // gate.shape[-1], sum(a.shape[0] for a in lora_a)
    (base,) = weights_of([weight], statistics, layouts)
    return gate.new_empty((*gate.shape[:-1], base.shape[0])), gate.new_empty((tokens, rank))


def _adapters(lora_a: Any, lora_b: Any, masks: Any, scalings: Any, masked: Any) -> list[products.Adapter]:
    return products.adapters_of(lora_a, lora_b, masks, [0] * len(lora_a), scalings, masked)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    gate, up, weight, bias, *lists = inputs[:7]
    ctx.statistics, ctx.layouts, ctx.scalings, ctx.masked, activation, scalars, ctx.inplace_backward = inputs[7:]
    ctx.options = activation, scalars, False
    ctx.lengths = [len(each) for each in lists]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate, up, weight, output[1], *(tensor for each in lists for tensor in each))


def _backward(ctx: Any, dy: torch.Tensor | None, _: torch.Tensor | None) -> tuple[Any, ...]:
    constants = ([None] * len(ctx.statistics), *(None,) * 6)
    if dy is None:
        return (None, None, None, None, *([None] * length for length in ctx.lengths), *constants)
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("lora_mlp and lora_down"))
    need_gate, need_up, need_weight, need_bias, need_a, need_b, *_ = ctx.needs_input_grad
    gate, up, weight, z, *flat = ctx.saved_tensors
    remaining = iter(flat)
    lora_a, lora_b, masks = ([next(remaining) for _ in range(length)] for length in ctx.lengths)
    adapters = _adapters(lora_a, lora_b, masks, ctx.scalings, ctx.masked)
    need_h, dy = need_weight or any(need_a), rows_of(dy)
    dgate = dup = h = dweight = None
    da = [None] * len(lora_a)
    with torch.autocast(gate.device.type, enabled=False):
        dz = products.low_rank_gradient([dy], z, adapters)
        if need_gate or need_up:
            dh = products.input_gradient([dy], weights_of([weight], ctx.statistics, ctx.layouts), dz, adapters)
            dgate, dup, h = gradients_and_h(ctx, dh, gate, up, need_gate, need_up, need_h)
        elif need_h:
            h = rows_of(gated.gated_activation(gate, up, *ctx.options, False))
        if need_weight:
            dweight = products.product(dy, h, weight.dtype)
        if any(need_a):
            da = split_rows(products.a_gradients(dz, h, adapters), lora_a, need_a)
        db = [products.b_gradient([dy], z, each) if need else None for each, need in zip(adapters, need_b)]
    dbias = dy.sum(0, dtype=ctx.bias_dtype) if need_bias else None
    return dgate, dup, dweight, dbias, da, db, [None] * len(masks), *constants


gated_lora_down.register_autograd(_backward, setup_context=_setup_context)


def lora_down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: LoRALayer,
    activation: str = "silu",
    *,
    limit: float | None = None,
    inplace_backward: bool = False,
) -> torch.Tensor:
    """``act(gate) * up`` through a down projection with adapters, whose input is not kept but built again.

    Args:
        gate: (..., intermediate), or, with `up` None, a whole fused projection; see `swiglu_down`.
        up: Shaped as `gate`, or None.
        down: The down projection. All products are in `gate`'s dtype, under autocast in autocast's; see `lora_linear`.
        activation: ``"silu"``, or ``"tanh"`` or ``"none"`` for GELU with and without the approximation.
        limit: See `swiglu`; for SiLU only.
        inplace_backward: Let the backward write the gradients over `gate` and `up`; see `swiglu`.

    Returns:
        (..., hidden), in the dtype of the products.

    Raises:
        ValueError: For another activation, a limit of GELU, or if shapes or devices do not fit.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    name = _activation(activation, limit)
    gate, up = as_autocast(gate), None if up is None else as_autocast(up)
    takes = kernel_takes(gate, up, down.weight, down.bias, inplace_backward)
    if not takes or not down.adapters:
        return lora_linears(_product(gate, up, activation, limit, inplace_backward), [down])[0]
    adapters = down.adapters
    (memory,), statistics, layouts = flat_weights([down.weight])
    return gated_lora_down(
        *(gate, up, memory, down.bias),
        [adapter.a for adapter in adapters],
        [adapter.b for adapter in adapters],
        [adapter.mask for adapter in adapters if adapter.mask is not None],
        *(statistics, layouts),
        [float(adapter.scaling) for adapter in adapters],
        [adapter.mask is not None for adapter in adapters],
        *(name, gated.scalars(limit=limit), inplace_backward),
    )[0]


def lora_mlp(
    x: torch.Tensor,
    gate: LoRALayer,
    up: LoRALayer,
    down: LoRALayer,
    activation: str = "silu",
    *,
    limit: float | None = None,
) -> torch.Tensor:
    """``down(act(gate(x)) * up(x))`` of layers with adapters, each with or without.

    Args:
        x: (..., hidden). All products are in its dtype; under autocast, in autocast's.
        gate: The gate projection.
        up: The up projection.
        down: The down projection.
        activation: See `lora_down`.
        limit: See `lora_down`.

    Returns:
        (..., hidden), in the dtype of the products.

    Raises:
        ValueError: As `lora_down`.
        RuntimeError: In a backward of the backward.
    """
    gated_by, multiplied = lora_linears(x, [gate, up])
    return lora_down(gated_by, multiplied, down, activation, limit=limit, inplace_backward=True)


def lora_mlp_reference(
    x: torch.Tensor,
    gate: LoRALayer,
    up: LoRALayer,
    down: LoRALayer,
    activation: str = "silu",
    *,
    limit: float | None = None,
) -> torch.Tensor:
    """`lora_mlp` in plain torch, with a derivative of every order."""
    _activation(activation, limit)
    halves = lora_linears_reference(x, [gate, up])
    silu = activation == "silu"
    h = swiglu_reference(*halves, limit=limit) if silu else geglu_reference(*halves, activation)
    return lora_linears_reference(h, [down])[0]


def _activation(activation: str, limit: float | None) -> str:
    """The kernel's name of the activation."""
    if activation == "silu":
        return activation
    if activation not in ("tanh", "none"):
        raise ValueError(f"`activation` is {activation!r}; it must be 'silu', 'tanh' or 'none'.")
    if limit is not None:
        raise ValueError(f"`limit` is {limit!r}, but only 'silu' takes one; the activation is GELU ({activation!r}).")
    return activation_name(activation)


def _product(
    gate: torch.Tensor, up: torch.Tensor | None, activation: str, limit: float | None, inplace_backward: bool
) -> torch.Tensor:
    silu = activation == "silu"
    options: dict[str, Any] = {"limit": limit} if silu else {"approximate": activation}
    options["inplace_backward"] = inplace_backward
    if up is None:
        return (swiglu_fused if silu else geglu_fused)(gate, **options)
    return (swiglu if silu else geglu)(gate, up, **options)
