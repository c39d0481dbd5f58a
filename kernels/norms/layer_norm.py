"""LayerNorm over the last dimension.

Formula (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450), for one row of `x` with hidden size H:

    x_hat = (x - mean(x)) * rstd        rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)        y = x_hat * weight + bias

and, with g = dy * weight,

    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))
    dweight = sum over rows of dy * x_hat        dbias = sum over rows of dy

Forward reads x and writes y (4 bytes per element in bf16); backward reads x and dy and writes dx (6 bytes). Saved for
backward: x, weight, bias, and mean and rstd (fp32, one per row). The gradients of weight and bias are summed as in
`rms_norm`, without atomics.

With groups, each `group_size` elements of a row are normalised on their own, with their part of weight and bias: as in
an attention that normalises its heads with a weight for each.

The kernels can also add a residual before the norm, which `fused_add_layer_norm` uses: they then read the residual too,
write the sum, and in the backward add the gradient of the sum to dx.

Shapes: x (..., hidden_size); H elements of a group, GROUPS groups of a row, rows of all leading dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import (
    NormConfig,
    as_row_values,
    as_rows,
    autocast_dtype,
    backward_tiles,
    column_sum,
    empty_gradients,
    empty_in_order,
    empty_row_values,
    forward_tiles,
    memory_order,
    number_of_groups,
)
from liger_trainer.kernels.runtime import (
    check_norm_arguments,
    has_elements,
    next_power_of_2,
    on_device,
    reference_of,
    tl,
    triton,
)


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    num_rows,
    eps,
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
    values = rows * GROUPS + group  # where the statistics of a row are
    places = group * H + cols
    out = (rows * (GROUPS * H))[:, None] + places[None, :]
    x = tl.load(x_ptr + (rows * x_stride)[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + (rows * residual_stride)[:, None] + places[None, :], mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + out, total, mask=mask)
        x = total.to(tl.float32)  # the model normalises the rounded sum
    mean = tl.sum(x, axis=1) * (1.0 / H)
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) * (1.0 / H) + eps)
    tl.store(mean_ptr + values, mean, mask=rows < num_rows)
    tl.store(rstd_ptr + values, rstd, mask=rows < num_rows)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + places, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + places, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _layer_norm_backward_kernel(
    dy_ptr,
    total_grad_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_stride,
    total_grad_stride,
    x_stride,
    num_rows,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Computes dx of a group of every num_programs-th tile of ROWS rows, and a share of its dweight and dbias."""
    # When a row is short, summing the rows of a tile crosses warps, so that sum waits until the end.
    SUM_LATE: tl.constexpr = ROWS == 1 or BLOCK_H <= 1024
    SUM_ROWS: tl.constexpr = ROWS if SUM_LATE else 1
    cols = tl.arange(0, BLOCK_H)
    group = tl.program_id(1)
    places = group * H + cols
    share = (group * tl.num_programs(0) + tl.program_id(0)) * H + cols
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + places, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if dweight_ptr is not None:
        dweight = tl.zeros((SUM_ROWS, BLOCK_H), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((SUM_ROWS, BLOCK_H), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
        values = rows * GROUPS + group
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + places[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + places[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + values, mask=rows < num_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + values, mask=rows < num_rows, other=0.0)[:, None]
        x_hat = (x.to(tl.float32) - mean) * rstd  # not 0 past column H, but dy is
        if dx_ptr is not None:
            g = dy
            if weight_ptr is not None:
                g = dy * weight
            mean_g = tl.sum(g, axis=1)[:, None] * (1.0 / H)
            projection = tl.sum(g * x_hat, axis=1)[:, None] * (1.0 / H)
            dx = rstd * (g - mean_g - x_hat * projection)
            if total_grad_ptr is not None:
                total_grad_tile = total_grad_ptr + (rows * total_grad_stride)[:, None] + places[None, :]
                dx += tl.load(total_grad_tile, mask=mask, other=0.0).to(tl.float32)
            dx_tile = dx_ptr + (rows * (GROUPS * H))[:, None] + places[None, :]
            tl.store(dx_tile, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            if SUM_LATE:
                dweight += dy * x_hat
            else:
                dweight += tl.sum(dy * x_hat, axis=0)[None, :]
        if dbias_ptr is not None:
            if SUM_LATE:
                dbias += dy
            else:
                dbias += tl.sum(dy, axis=0)[None, :]
    if dweight_ptr is not None:
        tl.store(dweight_ptr + share, tl.sum(dweight, axis=0), mask=cols < H)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + share, tl.sum(dbias, axis=0), mask=cols < H)


def backward_config(hidden_size: int) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel.

    As for RMSNorm, with tiles of half the size for short rows: the gradient of the bias takes as many registers as that
    of the weight.
    """
    block = next_power_of_2(hidden_size)
    if block <= 1024:
        return NormConfig(rows=min(64, 2048 // block), num_warps=4, num_stages=3, programs_per_sm=4)
    num_warps = min(16, block // 512) if block <= 16384 else 32
    return NormConfig(rows=1, num_warps=num_warps, num_stages=3, programs_per_sm=max(1, 16 // num_warps))


def launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Runs the forward kernel and returns y of `dtype`, x + residual (None without one), and mean and rstd in fp32."""
    order = memory_order(x)
    y = empty_in_order(x, order, dtype)
    total = None if residual is None else empty_in_order(x, order, x.dtype)
    mean, rstd = empty_row_values(x, order, groups), empty_row_values(x, order, groups)
    if not has_elements(x):
        return y, total, mean, rstd
    rows = as_rows(x, order)
    residual_rows = None if residual is None else as_rows(residual, order)
    programs, options = forward_tiles(rows, groups)
    with on_device(x):
        _layer_norm_forward_kernel[(programs, groups)](
            rows,
            residual_rows,
            weight if weight is None else weight.contiguous(),
            bias if bias is None else bias.contiguous(),
            y,
            total,
            mean,
            rstd,
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            rows.shape[0],
            eps,
            GROUPS=groups,
            **options,
        )
    return y, total, mean, rstd


def launch_backward(
    dy: torch.Tensor,
    total_grad: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needed: list[bool],
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the backward kernels and returns dx (with `total_grad` added), dweight and dbias; see `empty_gradients`."""
    group_size, order = x.shape[-1] // groups, memory_order(x)
    dx, dweight, dbias = empty_gradients(needed, x, weight, bias)
    if not has_elements(x):
        return dx, dweight.zero_(), dbias.zero_()
    rows, dy_rows = as_rows(x, order), as_rows(dy, order)
    total_grad_rows = None if total_grad is None else as_rows(total_grad, order)
    config = backward_config(group_size)
    programs, options = backward_tiles(config, rows, dy_rows, total_grad_rows, groups=groups)
    outputs = [tensor for tensor in (dweight, dbias) if tensor.numel()]
    partial = x.new_empty(len(outputs), groups, programs, group_size, dtype=torch.float32)
    with on_device(x):
        _layer_norm_backward_kernel[(programs, groups)](
            dy_rows,
            total_grad_rows,
            rows,
            weight if weight is None else weight.contiguous(),
            as_row_values(mean, order),
            as_row_values(rstd, order),
            dx if needed[0] else None,
            partial[0] if dweight.numel() else None,
            partial[-1] if dbias.numel() else None,
            dy_rows.stride(0),
            0 if total_grad_rows is None else total_grad_rows.stride(0),
            rows.stride(0),
            rows.shape[0],
            GROUPS=groups,
            **options,
        )
        if outputs:
            column_sum(partial, *outputs)
    return dx, dweight, dbias


@operator("liger_trainer::layer_norm")
def _layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, mean, rstd = launch_forward(x, None, weight, bias, eps, dtype, groups)
    return y, mean, rstd


@operator("liger_trainer::layer_norm_backward")
def _layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needed: list[bool],
    groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return launch_backward(dy, None, x, weight, bias, mean, rstd, needed, groups)


refuse_second_derivative(_layer_norm_backward, "layer_norm")


def _setup_context(ctx, inputs, output):
    ctx.groups = inputs[5]
    ctx.save_for_backward(*inputs[:3], *output[1:])


def _backward(ctx, dy, _mean_grad, _rstd_grad):
    needed = list(ctx.needs_input_grad[:3])
    gradients = _layer_norm_backward(dy, *ctx.saved_tensors, needed, ctx.groups)
    return input_gradients(ctx, *where_needed(needed, *gradients))


_layer_norm.register_autograd(_backward, setup_context=_setup_context)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
    group_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """LayerNorm over the last dimension: `torch.nn.functional.layer_norm(x, (hidden_size,), weight, bias, eps)`.

    Statistics and gradients are computed in fp32 with one rounding at the end. The result has the memory layout of `x`
    (permuted leading dimensions stay permuted, gaps are closed).

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype.
        weight: Weight of shape (hidden_size,), or None for 1. Its dtype may differ from that of `x`.
        bias: Bias of shape (hidden_size,), or None for 0. Its dtype may differ from that of `x`.
        eps: Added to the variance.
        group_size: Normalise each group of so many elements of a row on its own, such as the heads of an attention that
            lie beside each other; a divisor of hidden_size. None for whole rows.
        dtype: Dtype of the result; None for that of `x`, or fp32 under autocast on an accelerator, as in torch.

    Returns:
        Tensor of the shape of `x`.

    Raises:
        ValueError: If `weight` or `bias` does not fit `x` in shape or device, a dtype is not floating point, `x` has no
            last dimension of at least 1, or `group_size` does not divide it.
    """
    on_triton = check_norm_arguments("layer_norm", x, weight=weight, bias=bias)
    groups = number_of_groups("layer_norm", x, group_size)
    result = dtype or autocast_dtype(x)
    if on_triton:
        return _layer_norm(x, weight, bias, eps, result, groups)[0]
    # In fp32: on a CPU, torch would sum half-precision gradients unconverted.
    compute = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(compute) for tensor in (weight, bias))
    wide = x.to(compute)
    if group_size is None:
        return F.layer_norm(wide, x.shape[-1:], weight, bias, eps).to(result)
    y = F.layer_norm(wide.unflatten(-1, (-1, group_size)), (group_size,), None, None, eps).flatten(-2)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(result)


layer_norm_reference = reference_of(layer_norm, "check_norm_arguments")
