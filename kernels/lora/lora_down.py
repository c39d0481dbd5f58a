"""A gated activation and its down projection with adapters, as two operators; formulas are in `lora_mlp`.

Two, so that a checkpoint repeats only the first, as in `gated_down`::

    stand_in = lora_down_save(gate, up, z, W, A, B)         dgate, dup, dz, dA, dB, dW, db = its backward, of dy
    y        = lora_down_product(stand_in, gate, ...)       dy -> stand_in

Where `z` is given, gate and up are without their adapters' products, which the elementwise kernels add
(`_lora_gated_kernels`): z holds the columns of gate's adapter, then those of up's, and `added_b` their B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch

from liger_trainer.kernels.autograd import second_derivative_message
from liger_trainer.kernels.lora import lora_gated_kernels as _lora_gated_kernels
from liger_trainer.kernels.lora import lora_products as products
from liger_trainer.kernels.lora.base_weights import Weight, weights_of
from liger_trainer.kernels.lora.lora_gated_kernels import LowRank
from liger_trainer.kernels.lora.lora_linears import split_rows
from liger_trainer.kernels.lora.lora_products import rows_of
from liger_trainer.kernels.mlp import gated_activation as gated
from liger_trainer.kernels.mlp.gated_down import gradients_and_h, output_placeholder


@torch.library.custom_op("liger_trainer::lora_down_save", mutates_args=())
def lora_down_save(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    added_b: Sequence[torch.Tensor],
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    layouts: Sequence[int],
    added_scalings: Sequence[float],
    scalings: Sequence[float],
    masked: Sequence[bool],
    activation: str,
    scalars: Sequence[float],
    inplace_backward: bool,
) -> torch.Tensor:
    """Stands in for y, whose gradient it turns into those of the operands; call `lora_down`, which checks its inputs.

    `up` is None where `gate` is a whole fused projection. `added_b` has none or one for gate, then for up, and
    `added_scalings` one factor for each half, 0 where it has no adapter; `statistics` and `layouts` are of a weight in
    4 bits.
    """
    return _stand_in(gate, weight, statistics, layouts)


@lora_down_save.register_fake
def _(gate, up, weight, bias, z, added_b, lora_a, lora_b, masks, statistics, layouts, *_):
    return _stand_in(gate, weight, statistics, layouts)


def _stand_in(gate: torch.Tensor, weight: torch.Tensor, statistics: Any, layouts: Any) -> torch.Tensor:
    (base,) = weights_of([weight], statistics, layouts)
    return output_placeholder(gate, base.shape[0])


@torch.library.custom_op("liger_trainer::lora_down_product", mutates_args=())
def lora_down_product(
    stand_in: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    z: torch.Tensor | None,
    added_b: Sequence[torch.Tensor],
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    statistics: Sequence[torch.Tensor],
    layouts: Sequence[int],
    added_scalings: Sequence[float],
    scalings: Sequence[float],
    masked: Sequence[bool],
    activation: str,
    scalars: Sequence[float],
) -> torch.Tensor:
    """Y of the down projection, whose gradient goes to `stand_in`."""
    (base,) = weights_of([weight], statistics, layouts)
    h = gated.empty_h(gate, up)
    if z is not None and up is not None:
        updates = _updates(z, added_b, added_scalings)
        _lora_gated_kernels.launch_forward(rows_of(gate), rows_of(up), rows_of(h), updates, activation, scalars[2])
    elif h.numel():
        gated.launch_forward(gate, up, h, activation, scalars, False)
    adapters = _adapters(lora_a, lora_b, masks, scalings, masked)
    with torch.autocast(gate.device.type, enabled=False):
        rows = rows_of(h)
        y = products.project(rows, base, bias, products.project_down(rows, adapters), adapters)
    return y.view(stand_in.shape)


@lora_down_product.register_fake
def _(stand_in, gate, *_):
    return gate.new_empty(stand_in.shape)


def _keep_lengths(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.lengths = [len(each) for each in inputs[6:11]]


def _hand_over(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return dy, *(None,) * 5, *([None] * length for length in ctx.lengths), *(None,) * 6


lora_down_product.register_autograd(_hand_over, setup_context=_keep_lengths)


def _adapters(lora_a: Any, lora_b: Any, masks: Any, scalings: Any, masked: Any) -> list[products.Adapter]:
    return products.adapters_of(lora_a, lora_b, masks, [0] * len(lora_a), scalings, masked)


_Half: TypeAlias = tuple[torch.Tensor, slice, float]


def _halves(added_b: Sequence[torch.Tensor], scalings: Sequence[float]) -> Iterator[_Half | None]:
    """Of gate's adapter, then of up's: B, its columns of z and its factor."""
    remaining, start = iter(added_b), 0
    for scaling in scalings:
        if not scaling:
            yield None
            continue
        b = next(remaining)
        yield b, slice(start, start + b.shape[1]), scaling
        start += b.shape[1]


def _updates(z: torch.Tensor, added_b: Sequence[torch.Tensor], scalings: Sequence[float]) -> list[LowRank | None]:
    rows = rows_of(z)
    return [half and LowRank(rows[:, half[1]], half[0].T, half[2]) for half in _halves(added_b, scalings)]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gate, up, weight, bias, z, *lists = inputs[:9]
    # Statistics are not saved as activations are, for hooks to move: they are parts of the model.
    ctx.statistics, ctx.layouts, ctx.added_scalings, ctx.scalings, ctx.masked, *options = inputs[9:]
    activation, scalars, ctx.inplace_backward = options
    ctx.options = activation, scalars, False
    ctx.lengths = [len(each) for each in lists]
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gate, up, weight, z, *(tensor for each in lists for tensor in each))


def _backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
    constants = [None] * len(ctx.statistics), *(None,) * 7
    if dy is None:
        return *(None,) * 5, *([None] * length for length in ctx.lengths), *constants
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("lora_mlp and lora_down"))
    need_gate, need_up, need_weight, need_bias, _, need_added, need_a, need_b, *_ = ctx.needs_input_grad
    gate, up, weight, z, *flat = ctx.saved_tensors
    remaining = iter(flat)
    added_b, lora_a, lora_b, masks = ([next(remaining) for _ in range(length)] for length in ctx.lengths)
    adapters = _adapters(lora_a, lora_b, masks, ctx.scalings, ctx.masked)
    (base,) = weights_of([weight], ctx.statistics, ctx.layouts)
    dy = rows_of(dy)
    dgate: torch.Tensor | None = None
    dup: torch.Tensor | None = None
    dweight: torch.Tensor | None = None
    dz: torch.Tensor | None = None
    dadded, da, db = (list[torch.Tensor | None]([None] * len(each)) for each in (added_b, lora_a, lora_b))
    with torch.autocast(gate.device.type, enabled=False):
        dlow = products.low_rank_gradient([dy], adapters)
        if z is not None:
            dgate, dup, h = _gradients_with_updates(ctx, dy, base, dlow, adapters, gate, up, z, added_b)
            dz, dadded = _gradients_of_updates(ctx, dgate, dup, z, added_b, need_added)
        elif need_gate or need_up:
            need_h = need_weight or any(need_a) or any(need_b)
            dh = products.input_gradient([dy], [base], dlow, adapters)
            dgate, dup, h = gradients_and_h(ctx, dh, gate, up, need_gate, need_up, need_h)
        else:
            h = rows_of(gated.gated_activation(gate, up, *ctx.options, False))
        if need_weight:
            dweight = products.product(dy, h, weight.dtype)
        if any(need_a):
            da = split_rows(products.a_gradients(dlow, h, adapters), lora_a, need_a)
        if any(need_b):
            low = products.project_down(h, adapters)
            db = [products.b_gradient([dy], low, each) if need else None for each, need in zip(adapters, need_b)]
    dbias = dy.sum(0, dtype=ctx.bias_dtype) if need_bias else None
    return dgate, dup, dweight, dbias, dz, dadded, da, db, [None] * len(masks), *constants


def _gradients_with_updates(
    ctx: Any,
    dy: torch.Tensor,
    weight: Weight,
    dlow: torch.Tensor,
    adapters: Sequence[products.Adapter],
    gate: torch.Tensor,
    up: torch.Tensor,
    z: torch.Tensor,
    added_b: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, and h, where the elementwise kernel adds what adapters contribute."""
    low_rank = products.low_rank_input_gradient(dlow, adapters, _lora_gated_kernels.MAX_RANK)
    dh = products.input_gradient([dy], [weight], dlow, [] if low_rank else adapters)
    overwrites = gated.overwrites_saved(ctx)
    dgate, dup = gate.detach() if overwrites else gate.clone(), up.detach() if overwrites else up.clone()
    factors = low_rank or (None, None)
    _lora_gated_backward_(dh, dgate, dup, z, added_b, ctx.added_scalings, *factors, *ctx.options[:2])
    return dgate, dup, dh


@torch.library.custom_op("liger_trainer::lora_gated_backward_", mutates_args=("dh", "gate", "up"))
def _lora_gated_backward_(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    z: torch.Tensor,
    added_b: Sequence[torch.Tensor],
    added_scalings: Sequence[float],
    dlow: torch.Tensor | None,
    lora_a: torch.Tensor | None,
    activation: str,
    scalars: Sequence[float],
) -> None:
    """Overwrites gate and up with their gradients and dh with h, once ``dlow @ lora_a`` is added to dh."""
    updates = _updates(z, added_b, added_scalings)
    updates.append(None if dlow is None or lora_a is None else LowRank(dlow, lora_a, 1.0))

    gated.write_over(
        gate, up, lambda *rows: _lora_gated_kernels.launch_backward(dh, *rows, updates, activation, scalars[2])
    )


@_lora_gated_backward_.register_fake
def _(dh, gate, up, *_):
    return None


def _gradients_of_updates(
    ctx: Any,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    z: torch.Tensor,
    added_b: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Of z, and of the B of gate and up."""
    rows, dz = rows_of(z), torch.empty_like(z)
    gradients: list[torch.Tensor | None] = []
    upstreams = [rows_of(dgate), rows_of(dup)]
    for upstream, half in zip(upstreams, _halves(added_b, ctx.added_scalings)):
        if half is not None:
            b, columns, scaling = half
            out = rows_of(dz)[:, columns]
            torch.addmm(out, upstream, b.to(z.dtype), beta=0, alpha=scaling, out=out)
            need = needed[len(gradients)]
            gradients.append(products.product(upstream, rows[:, columns], b.dtype, scaling) if need else None)
    return dz, gradients


lora_down_save.register_autograd(_backward, setup_context=_setup_context)
