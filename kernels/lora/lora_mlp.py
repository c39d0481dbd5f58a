"""A gated MLP whose projections have low-rank adapters, which does not save the input of its down projection.

::

    gate, up = two layers of x (`lora.py`)            h = act(gate) * up            y = h @ W^T + b + s (h @ A^T) @ B^T

Of the down projection's gradients only those of the adapters, and dW where W is trained, need h, which the elementwise
pass of the backward recomputes over dh, as in `gated_down.py`. Saved for backward: x, gate and up. Eager code also
saves act(gate), h, and x and h once more in the adapters' dtype.

Where gate and up have at most one adapter each, and at least one of them has, the adapters' products ``s z @ B^T`` are
added by the elementwise kernels of forward and backward (`lora_gated_kernels.py`). That saves a pass over gate and one
over up, and the same again where a checkpoint repeats them.

The down projection is two operators, as in `gated_down.py`, so that a checkpoint only repeats the first::

    placeholder = lora_down_save(gate, up, z, W, A, B)         dgate, dup, dz, dA, dB, dW, db = its backward, of dy
    y           = lora_down_product(placeholder, gate, ...)    dy -> placeholder

With `z`, gate and up do not contain their adapters' products: z holds the columns of gate's adapter, then those of
up's, and `added_b` their B.

Shapes: x (..., hidden), gate and up (..., intermediate), W (hidden, intermediate), A (rank, intermediate), B (hidden,
rank).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.activation import GATED, SILU, Activation, GatedActivation
from liger_trainer.kernels.autograd import input_gradients, pass_to_placeholder, second_derivative_message
from liger_trainer.kernels.lora import lora_gated_kernels
from liger_trainer.kernels.lora import lora_products as products
from liger_trainer.kernels.lora.lora import (
    LoRA,
    LoRALayer,
    check_adapters,
    lora_linears,
    lora_linears_operator,
    lora_linears_reference,
)
from liger_trainer.kernels.lora.lora_gated_kernels import MAX_RANK, LowRank
from liger_trainer.kernels.lora.lora_products import (
    Weight,
    flat_weights,
    lists_of,
    or_empty,
    or_none,
    rows_of,
    split_rows,
    weights_of,
)
from liger_trainer.kernels.mlp import gated_activation as gated
from liger_trainer.kernels.mlp.gated_down import (
    glu,
    glu_reference,
    gradients_and_h,
    kernel_takes,
    output_placeholder,
)
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast, use_triton


class DownOperands(NamedTuple):
    """What the two operators of a down projection read.

    Args:
        gate: (..., intermediate), or a whole fused projection.
        up: Shaped as `gate`; None where `gate` is a whole fused projection.
        weight: W, or the codes of one that is packed or in fp8.
        bias: (hidden,), or None.
        z: The product of x with A of gate's adapter and of up's, whose products are still to be added; None for none.
        added_b: With `z`, B of gate and B of up; one that does not exist is a tensor without elements, as below.
        lora_a: A of the down projection's adapters.
        lora_b: B of these.
        masks: Their dropout masks.
        statistics: The statistics of a packed weight (`flat_weights`).
        layouts: Its layout.
        added_scalings: Factors of the products to be added.
        scalings: Factors of the down projection's adapters.
        activation: Name of the activation.
        scalars: Its options, those of a `GatedActivation`.
    """

    gate: torch.Tensor
    up: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    z: torch.Tensor | None
    added_b: Sequence[torch.Tensor]
    lora_a: Sequence[torch.Tensor]
    lora_b: Sequence[torch.Tensor]
    masks: Sequence[torch.Tensor]
    statistics: Sequence[torch.Tensor]
    layouts: Sequence[int]
    added_scalings: Sequence[float]
    scalings: Sequence[float]
    activation: str
    scalars: Sequence[float]

    @property
    def form(self) -> GatedActivation:
        """The activation with its options."""
        return GatedActivation(self.activation, self.scalars)

    @property
    def base(self) -> Weight:
        """W, of any kind."""
        return weights_of([self.weight], self.statistics, self.layouts)[0]


def _placeholder(operands: DownOperands, inplace_backward: bool) -> torch.Tensor:
    """A placeholder for y, whose gradient it turns into those of the operands. It does not check its arguments."""
    return output_placeholder(operands.gate, operands.base.shape[0])


lora_down_save = operator("liger_trainer::lora_down_save")(_placeholder)
lora_down_save.register_fake(_placeholder)


@operator("liger_trainer::lora_down_product")
def lora_down_product(placeholder: torch.Tensor, operands: DownOperands) -> torch.Tensor:
    """The result y of the down projection, whose gradient goes to `placeholder`."""
    gate, up, _, bias, z, added_b, lora_a, lora_b, masks, *_ = operands
    form = operands.form
    h = gated.empty_h(gate, up)
    if z is not None and up is not None:
        updates = _updates(z, added_b, operands.added_scalings)
        tensors = rows_of(gate), rows_of(up), rows_of(h)
        lora_gated_kernels.launch_forward(*tensors, updates, form.activation, form.limit)
    else:
        gated.launch_forward(gate, up, h, form)
    adapters = products.adapters_of(lora_a, lora_b, masks, operands.scalings)
    with torch.autocast(gate.device.type, enabled=False):
        rows = rows_of(h)
        y = products.project(rows, operands.base, bias, products.project_down(rows, adapters), adapters)
    return y.view(placeholder.shape)


@lora_down_product.register_fake
def _(placeholder, operands):
    return operands.gate.new_empty(placeholder.shape)


pass_to_placeholder(lora_down_product)


def _added(
    added_b: Sequence[torch.Tensor], scalings: Sequence[float]
) -> Iterator[tuple[torch.Tensor, slice, float] | None]:
    """For gate, then for up: B of its adapter, its columns of z, and its factor; None without an adapter."""
    start = 0
    for b, scaling in zip(added_b, scalings):
        columns, start = slice(start, start + b.shape[1]), start + b.shape[1]
        yield (b, columns, scaling) if b.numel() else None


def _updates(z: torch.Tensor, added_b: Sequence[torch.Tensor], scalings: Sequence[float]) -> list[LowRank | None]:
    """The products to be added to gate and to up."""
    rows = rows_of(z)
    return [each and LowRank(rows[:, each[1]], each[0].T, each[2]) for each in _added(added_b, scalings)]


def _setup_context(ctx: Any, inputs: tuple[DownOperands, bool], output: torch.Tensor) -> None:
    operands, ctx.inplace_backward = inputs
    gate, up, weight, bias, z, *lists = operands[:9]
    # The statistics are part of the model as well: see `keep_packed`.
    ctx.statistics, ctx.layouts, ctx.added_scalings, ctx.scalings, *_ = operands[9:]
    ctx.form = operands.form
    ctx.lengths = [len(each) for each in lists]
    ctx.bias_dtype = None if bias is None else bias.dtype
    (kept,) = products.keep_packed(ctx, [weight])
    ctx.save_for_backward(gate, up, kept, z, *(tensor for each in lists for tensor in or_none(each)))


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(second_derivative_message("lora_mlp and lora_down"))
    need_gate, need_up, need_weight, need_bias, _, need_added, need_a, need_b = ctx.needs_input_grad[:8]
    gate, up, kept, z, *flat = ctx.saved_tensors
    (weight,) = products.with_packed(ctx, [kept])
    added_b, lora_a, lora_b, masks = lists_of(or_empty(flat, gate), ctx.lengths)
    adapters = products.adapters_of(lora_a, lora_b, masks, ctx.scalings)
    (base,) = weights_of([weight], ctx.statistics, ctx.layouts)
    dy = rows_of(dy)
    dgate = dup = dweight = dz = None
    dadded, da, db = (list[torch.Tensor | None]([None] * length) for length in ctx.lengths[:3])
    with torch.autocast(gate.device.type, enabled=False):
        dlow = products.low_rank_gradient([dy], adapters)
        if z is not None:
            dgate, dup, h = _gradients_with_updates(ctx, dy, base, dlow, adapters, gate, up, z, added_b)
            dz, dadded = _gradients_of_updates(ctx, dgate, dup, z, added_b, need_added)
        elif need_gate or need_up:
            dh = products.input_gradient([dy], [base], dlow, adapters)
            need_h = need_weight or any(need_a) or any(need_b)
            dgate, dup, h = gradients_and_h(ctx, dh, gate, up, need_gate, need_up, need_h)
        else:
            h = rows_of(gated.gated_activation(gate, up, ctx.form, False))
        if need_weight:
            dweight = products.product(dy, h, weight.dtype)
        if any(need_a):
            da = split_rows(products.a_gradients(dlow, h, adapters), lora_a, need_a)
        if any(need_b):
            low = products.project_down(h, adapters)
            db = [products.b_gradient([dy], low, each) if need else None for each, need in zip(adapters, need_b)]
    dbias = dy.sum(0, dtype=ctx.bias_dtype) if need_bias else None
    return input_gradients(ctx, dgate, dup, dweight, dbias, dz, dadded, da, db)


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
    """The gradients of gate and up, and h, where the elementwise kernel adds the adapters' products."""
    low_rank = products.low_rank_input_gradient(dlow, adapters, lora_gated_kernels.MAX_RANK)
    dh = products.input_gradient([dy], [weight], dlow, [] if low_rank else adapters)
    overwrites = gated.overwrites_saved(ctx)
    dgate, dup = (gated.rows_of(x.detach() if overwrites else x.clone()) for x in (gate, up))
    factors = low_rank or (None, None)
    _lora_gated_backward_(dh, dgate, dup, z, added_b, ctx.added_scalings, *factors, ctx.form.activation, ctx.form.limit)
    return dgate.view(gate.shape), dup.view(up.shape), dh


@operator("liger_trainer::lora_gated_backward_", mutates=("dh", "gate", "up"))
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
    limit: float,
) -> None:
    """Overwrites gate and up with their gradients and dh with h, after adding ``dlow @ lora_a`` to dh; all are rows."""
    of_dh = None if dlow is None or lora_a is None else LowRank(dlow, lora_a, 1.0)
    updates = [*_updates(z, added_b, added_scalings), of_dh]
    lora_gated_kernels.launch_backward(dh, gate, up, updates, activation, limit)


def _gradients_of_updates(
    ctx: Any,
    dgate: torch.Tensor,
    dup: torch.Tensor,
    z: torch.Tensor,
    added_b: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The gradients of z and of the B of gate and up."""
    rows, dz = rows_of(z), torch.empty_like(z)
    gradients: list[torch.Tensor | None] = [None] * len(added_b)
    for index, (upstream, added) in enumerate(zip((dgate, dup), _added(added_b, ctx.added_scalings))):
        if added is None:
            continue
        b, columns, scaling = added
        upstream, out = rows_of(upstream), rows_of(dz)[:, columns]
        torch.addmm(out, upstream, b.to(z.dtype), beta=0, alpha=scaling, out=out)
        if needed[index]:
            gradients[index] = products.product(upstream, rows[:, columns], b.dtype, scaling)
    return dz, gradients


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
    """``act(gate) * up`` through a down projection with adapters, whose input is recomputed instead of saved.

    Args:
        gate: (..., intermediate), or, with `up` None, a whole fused projection; see `swiglu_down`.
        up: Shaped as `gate`, or None.
        down: The down projection. All products are in `gate`'s dtype, under autocast in that of autocast.
        activation: ``"silu"``, ``"gelu_tanh"`` or ``"gelu"``, the last without the approximation.
        limit: See `swiglu`; only for SiLU.
        inplace_backward: Let the backward write the gradients over `gate` and `up`; see `swiglu`.

    Returns:
        (..., hidden), in the dtype of the products.

    Raises:
        ValueError: For another activation, for a limit with GELU, or if shapes or devices do not fit.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    row = _activation(activation, limit)
    gate, up = as_autocast(gate), as_autocast(up)
    takes = kernel_takes(gate, up, inplace_backward, weight_shape=down.weight.shape, bias=down.bias)
    if not takes or not down.adapters:
        return lora_linears(glu(gate, up, row, limit=limit, inplace_backward=inplace_backward), [down])[0]
    return _down(gate, up, down, row.name, limit, inplace_backward)


def _down(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    down: LoRALayer,
    activation: str,
    limit: float | None,
    inplace_backward: bool,
    z: torch.Tensor | None = None,
    added: Sequence[LoRA | None] = (),
) -> torch.Tensor:
    """`lora_down` by its operators; `added` are the adapters of gate and up whose products are still to be added."""
    check_adapters(gate if up is not None else gate.detach().narrow(-1, 0, gate.shape[-1] // 2), down)
    adapters = down.adapters
    (tensor,), statistics, layouts = flat_weights([down.weight])
    operands = DownOperands(
        *(gate, up, tensor, down.bias, z),
        or_empty([None if adapter is None else adapter.b for adapter in added], gate),
        [adapter.a for adapter in adapters],
        [adapter.b for adapter in adapters],
        or_empty([adapter.mask for adapter in adapters], gate),
        *(statistics, layouts),
        [0.0 if adapter is None else float(adapter.scaling) for adapter in added],
        [float(adapter.scaling) for adapter in adapters],
        *GatedActivation.of(activation, limit=limit)[:2],
    )
    return lora_down_product(lora_down_save(operands, inplace_backward), operands)


def lora_mlp(
    x: torch.Tensor,
    gate: LoRALayer,
    up: LoRALayer,
    down: LoRALayer,
    activation: str = "silu",
    *,
    limit: float | None = None,
) -> torch.Tensor:
    """``down(act(gate(x)) * up(x))`` of linear layers, each with or without adapters.

    Args:
        x: (..., hidden). All products are in its dtype; under autocast, in that of autocast.
        gate: The gate projection.
        up: The up projection.
        down: The down projection.
        activation: See `lora_down`.
        limit: See `lora_down`.

    Returns:
        (..., hidden), in the dtype of the products.

    Raises:
        ValueError: See `lora_down`.
        RuntimeError: In a backward of the backward.
    """
    x = as_autocast(x)
    if not _is_added_later(x, gate, up, down):
        pre, multiplied = lora_linears(x, [gate, up])
        return lora_down(pre, multiplied, down, activation, limit=limit, inplace_backward=True)
    row = _activation(activation, limit)
    for layer in (gate, up):  # the operator sees no B, and the elementwise kernels take the bounds of B from W
        check_adapters(x, layer)
    adapters = [next(iter(layer.adapters), None) for layer in (gate, up)]
    stacked = torch.cat([adapter.a for adapter in adapters if adapter is not None])
    layers = [LoRALayer(gate.weight, gate.bias), LoRALayer(up.weight, up.bias), LoRALayer(stacked)]
    pre, multiplied, z = lora_linears_operator(x, layers)
    kernel_takes(pre, multiplied, False, weight_shape=down.weight.shape, bias=down.bias)  # checks the shapes
    return _down(pre, multiplied, down, row.name, limit, True, z, adapters)


def _is_added_later(x: torch.Tensor, gate: LoRALayer, up: LoRALayer, down: LoRALayer) -> bool:
    """Whether the elementwise kernels add the products of gate's and up's adapters."""
    adapters = [*gate.adapters, *up.adapters]
    if not adapters or not down.adapters or max(len(gate.adapters), len(up.adapters)) > 1:
        return False
    plain = all(each.mask is None and each.a.shape[0] <= MAX_RANK for each in adapters)
    return plain and use_triton(x)


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
    row = _activation(activation, limit)
    pre, multiplied = lora_linears_reference(x, [gate, up])
    return lora_linears_reference(glu_reference(pre, multiplied, row, limit=limit), [down])[0]


def _activation(activation: str, limit: float | None) -> Activation:
    """The row of the activation."""
    row = GATED.get(activation)
    if row is None:
        *names, last = map(repr, GATED)
        raise ValueError(f"`activation` is {activation!r}; it must be {', '.join(names)} or {last}.")
    if limit is not None and row is not SILU:
        raise ValueError(f"`limit` is {limit!r}, but only 'silu' takes one; the activation is {activation!r}.")
    return row
