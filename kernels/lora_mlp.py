"""A gated MLP whose projections have low-rank adapters, which does not keep the product behind its activation.

::

    gate, up = two layers of x (`lora`)            h = act(gate) * up            y = h @ W^T + b + s (h @ A^T) @ B^T

Of the down projection's gradients only those of the adapters (and dW, where W is trained) need h, which the elementwise
pass of the backward builds again over dh, as in `gated_down`. Kept between forward and backward: x, gate and up. Eager
code keeps, beside these, act(gate), h, and x and h once more in the adapters' dtype.

The down projection is two operators, so that a checkpoint repeats only the first. Under torch's non-reentrant
checkpoints a recomputation ends with the last tensor that was saved, and an operator saves when it has run: as one, the
product and h, which are a third of the MLP, would be computed again for nobody. So the first saves, and returns a
stand-in for y that has y's shape and no memory; the second computes y, saves nothing, and hands dy to the stand-in::

    stand_in = lora_down_save(gate, up, W, A, B)            dgate, dup, dA, dB, dW, db = its backward, of dy
    y        = lora_down_product(stand_in, gate, ...)       dy -> stand_in
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels import _gated_activation as gated
from liger_trainer.kernels import _lora_products as products
from liger_trainer.kernels._autograd import second_derivative_message
from liger_trainer.kernels._gated_kernels import launch_forward
from liger_trainer.kernels._lora_linears import split_rows
from liger_trainer.kernels._lora_products import rows_of
from liger_trainer.kernels.gated_down import gradients_and_h, kernel_takes
from liger_trainer.kernels.geglu import activation_name, geglu, geglu_fused, geglu_reference
from liger_trainer.kernels.lora import LoRALayer, as_autocast, lora_linears, lora_linears_reference
from liger_trainer.kernels.swiglu import swiglu, swiglu_fused, swiglu_reference


@torch.library.custom_op("liger_trainer::lora_down_save", mutates_args=())
def lora_down_save(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    scalings: Sequence[float],
    masked: Sequence[bool],
    activation: str,
    scalars: Sequence[float],
    inplace_backward: bool,
) -> torch.Tensor:
    """Stands in for y, whose gradient it turns into those of the operands; call `lora_down`, which checks its inputs.

    `up` is None where `gate` is a whole fused projection.
    """
    return gate.new_zeros(()).expand(*gate.shape[:-1], weight.shape[0])


@lora_down_save.register_fake
def _(gate, up, weight, *_):
    return gate.new_empty(()).expand(*gate.shape[:-1], weight.shape[0])


@torch.library.custom_op("liger_trainer::lora_down_product", mutates_args=())
def lora_down_product(
    stand_in: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    scalings: Sequence[float],
    masked: Sequence[bool],
    activation: str,
    scalars: Sequence[float],
) -> torch.Tensor:
    """Y of the down projection, whose gradient goes to `stand_in`."""
    h = gated.empty_h(gate, up)
    if h.numel():
        launch_forward(gate, up, h, activation, scalars, False)
    adapters = _adapters(lora_a, lora_b, masks, scalings, masked)
    with torch.autocast(gate.device.type, enabled=False):
        rows = rows_of(h)
        y = products.project(rows, weight, bias, products.project_down(rows, adapters), adapters)
    return y.view(stand_in.shape)


@lora_down_product.register_fake
def _(stand_in, gate, *_):
    return gate.new_empty(stand_in.shape)


def _keep_lengths(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.lengths = [len(each) for each in inputs[5:8]]


def _hand_over(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return dy, *(None,) * 4, *([None] * length for length in ctx.lengths), *(None,) * 4


lora_down_product.register_autograd(_hand_over, setup_context=_keep_lengths)


def _adapters(lora_a: Any, lora_b: Any, masks: Any, scalings: Any, masked: Any) -> list[products.Adapter]:
    return products.adapters_of(lora_a, lora_b, masks, [0] * len(lora_a), scalings, masked)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, weight, bias, *lists, ctx.scalings, ctx.masked, activation, scalars, ctx.inplace_backward = inputs
    ctx.options = activation, scalars, False
    ctx.lengths = [len(each) for each in lists]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate, up, weight, *(tensor for each in lists for tensor in each))


def _backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None, None, None, None, *([None] * length for length in ctx.lengths), *(None,) * 5)
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("lora_mlp and lora_down"))
    need_gate, need_up, need_weight, need_bias, need_a, need_b, *_ = ctx.needs_input_grad
    gate, up, weight, *flat = ctx.saved_tensors
    remaining = iter(flat)
    lora_a, lora_b, masks = ([next(remaining) for _ in range(length)] for length in ctx.lengths)
    adapters = _adapters(lora_a, lora_b, masks, ctx.scalings, ctx.masked)
    need_h, dy = need_weight or any(need_a) or any(need_b), rows_of(dy)
    dgate = dup = h = dweight = None
    da, db = [None] * len(lora_a), [None] * len(lora_b)
    with torch.autocast(gate.device.type, enabled=False):
        dz = products.low_rank_gradient([dy], adapters)
        if need_gate or need_up:
            dh = products.input_gradient([dy], [weight], dz, adapters)
            dgate, dup, h = gradients_and_h(ctx, dh, gate, up, need_gate, need_up, need_h)
        elif need_h:
            h = rows_of(gated.gated_activation(gate, up, *ctx.options, False))
        if need_weight:
            dweight = products.product(dy, h, weight.dtype)
        if any(need_a):
            da = split_rows(products.a_gradients(dz, h, adapters), lora_a, need_a)
        if any(need_b):
            z = products.project_down(h, adapters)
            db = [products.b_gradient([dy], z, each) if need else None for each, need in zip(adapters, need_b)]
    dbias = dy.sum(0, dtype=ctx.bias_dtype) if need_bias else None
    return dgate, dup, dweight, dbias, da, db, [None] * len(masks), *(None,) * 5


lora_down_save.register_autograd(_backward, setup_context=_setup_context)


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
    operands = (
        *(gate, up, down.weight, down.bias),
        [adapter.a for adapter in adapters],
        [adapter.b for adapter in adapters],
        [adapter.mask for adapter in adapters if adapter.mask is not None],
        [float(adapter.scaling) for adapter in adapters],
        [adapter.mask is not None for adapter in adapters],
        *(name, gated.scalars(limit=limit)),
    )
    return lora_down_product(lora_down_save(*operands, inplace_backward), *operands)


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
