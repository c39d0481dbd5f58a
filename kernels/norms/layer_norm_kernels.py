"""The LayerNorm kernels, with and without a residual added first, and how they are launched.

Forward, for a row of `x`:      total = x + residual;  x_hat = (total - mean) * rstd;  y = x_hat * weight + bias
Backward, for its gradients:    g = dy * weight;  dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat)) + total_grad

Forward reads x (and the residual) and writes y (and the sum); backward reads x, dy (and the gradient of the sum) and
writes dx. `layer_norm` and `fused_add_layer_norm` are the operators.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.norms.launch import (
    NormConfig,
    as_row_values,
    as_rows,
    column_sum,
    empty_in_order,
    empty_row_values,
    fit_config,
    forward_config,
    memory_order,
)
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, num_sms, on_device, tl, triton


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
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_H)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    out = (rows * H)[:, None] + cols[None, :]
    x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + (rows * residual_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(total_ptr + out, total, mask=mask)
        x = total.to(tl.float32)  # the model normalises the sum as it was rounded
    mean = tl.sum(x, axis=1) * (1.0 / H)
    centred = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=1) * (1.0 / H) + eps)
    tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
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
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # Adding the rows of a tile goes across warps when a row is short, so there it is left to the end.
    SUM_LATE: tl.constexpr = ROWS == 1 or BLOCK_H <= 1024
    SUM_ROWS: tl.constexpr = ROWS if SUM_LATE else 1
    cols = tl.arange(0, BLOCK_H)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0).to(tl.float32)[None, :]
    if dweight_ptr is not None:
        dweight = tl.zeros((SUM_ROWS, BLOCK_H), tl.float32)
    if dbias_ptr is not None:
        dbias = tl.zeros((SUM_ROWS, BLOCK_H), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        x_hat = (x.to(tl.float32) - mean) * rstd  # beyond H it meets dy = 0 only
        if dx_ptr is not None:
            g = dy
            if weight_ptr is not None:
                g = dy * weight
            mean_g = tl.sum(g, axis=1)[:, None] * (1.0 / H)
            projection = tl.sum(g * x_hat, axis=1)[:, None] * (1.0 / H)
            dx = rstd * (g - mean_g - x_hat * projection)
            if total_grad_ptr is not None:
                total_grad_tile = total_grad_ptr + (rows * total_grad_stride)[:, None] + cols[None, :]
                dx += tl.load(total_grad_tile, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + (rows * H)[:, None] + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
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
        tl.store(dweight_ptr + tl.program_id(0) * H + cols, tl.sum(dweight, axis=0), mask=cols < H)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + tl.program_id(0) * H + cols, tl.sum(dbias, axis=0), mask=cols < H)


def backward_config(hidden_size: int, device: torch.device) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel.

    As for RMSNorm, with tiles of half the size for short rows: the gradient of the bias takes as many registers again
    as that of the weight.
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
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Runs the forward kernel; gives `y` of `dtype`, the sum (None without a residual), and fp32 `mean` and `rstd`."""
    hidden_size, order = x.shape[-1], memory_order(x)
    y = empty_in_order(x, order, dtype)
    total = None if residual is None else empty_in_order(x, order, x.dtype)
    mean, rstd = empty_row_values(x, order), empty_row_values(x, order)
    if x.numel() == 0:
        return y, total, mean, rstd
    rows = as_rows(x, order)
    residual_rows = None if residual is None else as_rows(residual, order)
    config = fit_config(forward_config(hidden_size, x.device), hidden_size, x.element_size(), x.device)
    with on_device(x):
        _layer_norm_forward_kernel[(cdiv(rows.shape[0], config.rows),)](
            rows,
            residual_rows,
            weight if weight is None else weight.contiguous(),
            bias if bias is None else bias.contiguous(),
            as_rows(y, order),
            None if total is None else as_rows(total, order),
            as_row_values(mean, order),
            as_row_values(rstd, order),
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            rows.shape[0],
            eps,
            H=hidden_size,
            ROWS=config.rows,
            BLOCK_H=next_power_of_2(hidden_size),
            num_warps=config.num_warps,
        )
    return y, total, mean, rstd


def launch_backward(
    dy: torch.Tensor,
    total_grad: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs_dx: bool,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs the backward kernels; gives `dx` (with `total_grad` added), `dweight`, `dbias`, empty where not needed."""
    hidden_size, order = x.shape[-1], memory_order(x)
    dx, dweight, dbias = empty_gradients(x, needs_dx, dweight_dtype, dbias_dtype)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    rows, dy_rows = as_rows(x, order), as_rows(dy, order)
    total_grad_rows = None if total_grad is None else as_rows(total_grad, order)
    streams = [tensor for tensor in (rows, dy_rows, total_grad_rows) if tensor is not None]
    bytes_per_column = sum(tensor.element_size() for tensor in streams)
    config = fit_config(backward_config(hidden_size, x.device), hidden_size, bytes_per_column, x.device)
    programs = min(cdiv(rows.shape[0], config.rows), num_sms(x.device) * config.programs_per_sm)
    outputs = [tensor for tensor in (dweight, dbias) if tensor.numel()]
    partial = x.new_empty(len(outputs), programs, hidden_size, dtype=torch.float32)
    with on_device(x):
        _layer_norm_backward_kernel[(programs,)](
            dy_rows,
            total_grad_rows,
            rows,
            weight if weight is None else weight.contiguous(),
            as_row_values(mean, order),
            as_row_values(rstd, order),
            as_rows(dx, order) if needs_dx else None,
            None if dweight_dtype is None else partial[0],
            None if dbias_dtype is None else partial[-1],
            dy_rows.stride(0),
            0 if total_grad_rows is None else total_grad_rows.stride(0),
            rows.stride(0),
            rows.shape[0],
            H=hidden_size,
            ROWS=config.rows,
            BLOCK_H=next_power_of_2(hidden_size),
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
        if outputs:
            column_sum(partial, *outputs)
    return dx, dweight, dbias


def empty_gradients(
    x: torch.Tensor, needs_dx: bool, dweight_dtype: torch.dtype | None, dbias_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New gradients of x, weight and bias, empty where not needed; what `launch_backward` allocates."""
    dx = empty_in_order(x, memory_order(x), x.dtype) if needs_dx else x.new_empty(0)
    dweight, dbias = (
        x.new_empty(0 if dtype is None else x.shape[-1], dtype=dtype or x.dtype)
        for dtype in (dweight_dtype, dbias_dtype)
    )
    return dx, dweight, dbias
