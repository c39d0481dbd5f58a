"""RMSNorm with a gate, as in the mixers of Mamba 2 and of gated delta nets, over rows or over groups of their elements.

Formula, for one group of H elements of a row, with a = act(gate), where act(g) is g * sigmoid(g) or sigmoid(g):

    gate last:   rstd = 1 / sqrt(mean(x^2) + eps)    x_hat = x * rstd    y = x_hat * weight * a
    gate first:  u = x * a        (rstd is of u)     x_hat = u * rstd    y = x_hat * weight

and, with g = dy * weight (times a, with the gate last) and p = rstd * (g - x_hat * mean(g * x_hat)),

    gate last:   dx = p        dgate = dy * weight * x_hat * act'(gate)    dweight = sum over rows of dy * x_hat * a
    gate first:  dx = p * a    dgate = p * x * act'(gate)                  dweight = sum over rows of dy * x_hat

Forward reads x and gate and writes y (6 bytes per element in bf16); backward reads x, gate and dy and writes dx and
dgate (10 bytes). Saved for backward: x, gate, weight and rstd (fp32, one per group): 4 bytes per element in bf16, where
eager torch saves 16. The weight's gradient is summed as in `rms_norm`, without atomics.

Shapes: x (..., hidden_size); H elements of a group, GROUPS groups of a row, rows of all leading dimensions.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.norms.rms_norm import times_rstd
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import (
    NormConfig,
    as_row_values,
    as_rows,
    backward_tiles,
    column_sum,
    empty_in_order,
    empty_row_values,
    forward_tiles,
    memory_order,
    number_of_groups,
)
from liger_trainer.kernels.runtime import (
    check_like,
    check_norm_arguments,
    has_elements,
    next_power_of_2,
    on_device,
    reference_of,
    tl,
    triton,
    use_triton,
)

ACTIVATIONS = ("silu", "sigmoid")
CASTINGS = ("llama", "gemma")


@triton.jit
def _gate_and_slope(gate, ACTIVATION: tl.constexpr):
    """act(gate) and act'(gate) of an fp32 tensor."""
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    slope = sigmoid * (1.0 - sigmoid)
    activation = sigmoid
    if ACTIVATION == "silu":
        activation = gate * sigmoid
        slope = sigmoid + gate * slope
    return activation, slope


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_forward_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    gate_stride,
    num_rows,
    eps,
    ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    CASTING: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Normalises a group of ROWS rows."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_H)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    group = tl.program_id(1)
    places = group * H + cols
    x = tl.load(x_ptr + (rows * x_stride)[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + (rows * gate_stride)[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
    activation, _ = _gate_and_slope(gate, ACTIVATION)
    if GATE_FIRST:
        x *= activation
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / H) + eps)
    tl.store(rstd_ptr + rows * GROUPS + group, rstd, mask=rows < num_rows)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    y = times_rstd(x, rstd[:, None], dtype, CASTING)
    weight = tl.load(weight_ptr + places, mask=cols < H, other=0.0)
    y *= weight.to(tl.float32)[None, :]
    if CASTING == "llama" and dtype == weight.dtype:  # else the product is in fp32, at least before the end
        y = y.to(dtype).to(tl.float32)
    if not GATE_FIRST:
        y *= activation
    out = (rows * (GROUPS * H))[:, None] + places[None, :]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gated_rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    gate_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    dgate_ptr,
    partial_ptr,
    dy_stride,
    x_stride,
    gate_stride,
    num_rows,
    ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Computes dx and dgate of a group of every num_programs-th tile of ROWS rows, and a share of its dweight."""
    # When a row is short, summing the rows of a tile crosses warps, so that sum waits until the end.
    SUM_LATE: tl.constexpr = ROWS == 1 or BLOCK_H <= 1024
    cols = tl.arange(0, BLOCK_H)
    group = tl.program_id(1)
    places = group * H + cols
    weight = tl.load(weight_ptr + places, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if partial_ptr is not None:
        dweight = tl.zeros((ROWS if SUM_LATE else 1, BLOCK_H), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + (rows * gate_stride)[:, None] + places[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows * GROUPS + group, mask=rows < num_rows, other=0.0)[:, None]
        activation, slope = _gate_and_slope(gate.to(tl.float32), ACTIVATION)
        if GATE_FIRST:
            x_hat = x * activation * rstd
            of_weight = dy * x_hat
            g = dy * weight
        else:
            x_hat = x * rstd
            of_weight = dy * activation * x_hat
            g = dy * weight * activation
        out = (rows * (GROUPS * H))[:, None] + places[None, :]
        if dx_ptr is not None or (GATE_FIRST and dgate_ptr is not None):
            projection = tl.sum(g * x_hat, axis=1)[:, None] * (1.0 / H)
            dx = rstd * (g - x_hat * projection)
        if dgate_ptr is not None:
            dgate = (dx * x if GATE_FIRST else dy * weight * x_hat) * slope
            tl.store(dgate_ptr + out, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        if dx_ptr is not None:
            if GATE_FIRST:
                dx *= activation
            tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            if SUM_LATE:
                dweight += of_weight
            else:
                dweight += tl.sum(of_weight, axis=0)[None, :]
    if partial_ptr is not None:
        share = (group * tl.num_programs(0) + tl.program_id(0)) * H + cols
        tl.store(partial_ptr + share, tl.sum(dweight, axis=0), mask=cols < H)


def backward_config(group_size: int) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel.

    As for LayerNorm, whose tiles are of half the size of RMSNorm's for short rows: the gate takes as many registers as
    the row.
    """
    block = next_power_of_2(group_size)
    if block <= 1024:
        return NormConfig(rows=min(64, 2048 // block), num_warps=4, num_stages=3, programs_per_sm=4)
    num_warps = min(16, block // 512) if block <= 16384 else 32
    stages = 3 if block < 16384 else 1  # three tiles of 16384 would not fit
    return NormConfig(rows=1, num_warps=num_warps, num_stages=stages, programs_per_sm=max(1, 16 // num_warps))


def _output_dtype(x: torch.Tensor, weight: torch.Tensor, gate_first: bool, casting: str) -> torch.dtype:
    """Dtype of the result: the promoted one where the product with the weight comes last and is not rounded."""
    return torch.promote_types(x.dtype, weight.dtype) if gate_first and casting == "llama" else x.dtype


@operator("liger_trainer::gated_rms_norm")
def _gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    groups: int,
    activation: str,
    gate_first: bool,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    order = memory_order(x)
    y = empty_in_order(x, order, _output_dtype(x, weight, gate_first, casting))
    rstd = empty_row_values(x, order, groups)
    if not has_elements(x):
        return y, rstd
    rows, gate_rows = as_rows(x, order), as_rows(gate, order)
    programs, options = forward_tiles(rows, groups)
    with on_device(x):
        _gated_rms_norm_forward_kernel[(programs, groups)](
            rows,
            gate_rows,
            weight.contiguous(),
            y,
            rstd,
            rows.stride(0),
            gate_rows.stride(0),
            rows.shape[0],
            eps,
            ACTIVATION=activation,
            GATE_FIRST=gate_first,
            CASTING=casting,
            GROUPS=groups,
            **options,
        )
    return y, rstd


def _empty_gradients(
    needed: list[bool], x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order = memory_order(x)
    dx, dgate = (
        empty_in_order(x, order, each.dtype) if need else x.new_empty(0) for need, each in zip(needed, (x, gate))
    )
    return dx, dgate, weight.new_empty(weight.shape) if needed[2] else x.new_empty(0)


@operator("liger_trainer::gated_rms_norm_backward")
def _gated_rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    groups: int,
    activation: str,
    gate_first: bool,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    order, group_size = memory_order(x), x.shape[-1] // groups
    dx, dgate, dweight = _empty_gradients(needed, x, gate, weight)
    if not has_elements(x):
        return dx, dgate, dweight.zero_()
    rows, gate_rows, dy_rows = (as_rows(each, order) for each in (x, gate, dy))
    programs, options = backward_tiles(backward_config(group_size), rows, gate_rows, dy_rows, groups=groups)
    partial = x.new_empty(1, groups, programs, group_size, dtype=torch.float32) if needed[2] else None
    with on_device(x):
        _gated_rms_norm_backward_kernel[(programs, groups)](
            dy_rows,
            rows,
            gate_rows,
            weight.contiguous(),
            as_row_values(rstd, order),
            dx if needed[0] else None,
            dgate if needed[1] else None,
            partial,
            dy_rows.stride(0),
            rows.stride(0),
            gate_rows.stride(0),
            rows.shape[0],
            ACTIVATION=activation,
            GATE_FIRST=gate_first,
            GROUPS=groups,
            **options,
        )
        if partial is not None:
            column_sum(partial, dweight)
    return dx, dgate, dweight


refuse_second_derivative(_gated_rms_norm_backward, "gated_rms_norm")


def _setup_context(ctx, inputs, output):
    *tensors, _, ctx.groups, ctx.activation, ctx.gate_first, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _backward(ctx, dy, _):
    needed = list(ctx.needs_input_grad[:3])
    gradients = _gated_rms_norm_backward(dy, *ctx.saved_tensors, ctx.groups, ctx.activation, ctx.gate_first, needed)
    return input_gradients(ctx, *where_needed(needed, *gradients))


_gated_rms_norm.register_autograd(_backward, setup_context=_setup_context)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    group_size: int | None = None,
    activation: str = "silu",
    gate_first: bool = False,
    casting: str = "llama",
) -> torch.Tensor:
    """RMSNorm with a gate over the last dimension: `norm(x) * weight * act(gate)`, or `norm(x * act(gate)) * weight`.

    Everything is computed in fp32. The result has the memory layout of `x` (permuted leading dimensions stay permuted,
    gaps are closed).

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype.
        gate: The gate before its activation, of the shape of `x`. Its dtype may differ.
        weight: Weight of shape (hidden_size,). Its dtype may differ too.
        eps: Added to the mean square.
        group_size: Normalise each group of so many elements of a row on its own; a divisor of hidden_size. None for
            whole rows.
        activation: ``"silu"`` or ``"sigmoid"``.
        gate_first: Whether x is multiplied by the gate before the norm (Mamba 2) or after it (gated delta nets).
        casting: ``"llama"``: the normalised row is rounded to the dtype of `x`, then multiplied by the weight, in their
            promoted dtype; ``"gemma"``: nothing is rounded before the end.

    Returns:
        Tensor of the shape and dtype of `x`; with `gate_first` and ``casting="llama"``, of the dtype that `x` and
        `weight` promote to.

    Raises:
        ValueError: If `gate` or `weight` does not fit `x` in shape or device, a dtype is not floating point, `x` has no
            last dimension of at least 1, `group_size` does not divide it, or `activation` or `casting` is unknown.
    """
    for argument, value, allowed in (("activation", activation, ACTIVATIONS), ("casting", casting, CASTINGS)):
        if value not in allowed:
            names = " or ".join(map(repr, allowed))
            raise ValueError(f"`{argument}` of gated_rms_norm is {value!r}; it must be {names}.")
    on_triton = check_norm_arguments("gated_rms_norm", x, weight=weight)
    check_like("gated_rms_norm", x, ("shape", "device"), gate=gate)
    groups = number_of_groups("gated_rms_norm", x, group_size)
    if on_triton and use_triton(gate):
        return _gated_rms_norm(x, gate, weight, eps, groups, activation, gate_first, casting)[0]
    compute = torch.promote_types(x.dtype, torch.float32)
    wide, gate = x.to(compute), gate.to(compute)
    factor = torch.sigmoid(gate) if activation == "sigmoid" else torch.nn.functional.silu(gate)
    grouped = (wide * factor if gate_first else wide).unflatten(-1, (-1, group_size or x.shape[-1]))
    x_hat = (grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    y = weight * x_hat.to(x.dtype) if casting == "llama" else (weight.to(compute) * x_hat)
    if not gate_first:
        return (y * factor).to(x.dtype)
    return y if casting == "llama" else y.to(x.dtype)


gated_rms_norm_reference = reference_of(gated_rms_norm, "use_triton")
