"""The RMSNorm kernels, with and without a residual added first, and how they are launched.

Forward, for a row of `x`:      total = x + residual;  rstd = rsqrt(mean(total^2) + eps);  y = total * rstd * scale
Backward, for its gradients:    g = dy * scale;  dx = rstd * (g - x_hat * mean(g * x_hat)) + total_grad

with scale = offset + weight. Forward reads x (and the residual) and writes y (and the sum); backward reads x, dy (and
the gradient of the sum) and writes dx. `rms_norm` and `fused_add_rms_norm` are the operators.
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

CASTINGS = ("llama", "gemma", "olmo2", "none")


@triton.jit
def load_scale(weight_ptr, cols, offset, H: tl.constexpr, CASTING: tl.constexpr):
    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0)
    scale = weight.to(tl.float32) + offset
    if CASTING != "gemma":
        scale = scale.to(weight.dtype).to(tl.float32)
    return scale[None, :]


@triton.jit
def normalise(x, eps, dtype: tl.constexpr, H: tl.constexpr, CASTING: tl.constexpr):
    """The rows of the fp32 tile `x` over their root mean square, with the roundings of `CASTING`; and 1 / that."""
    if CASTING == "none":
        mean_square = (tl.sum((x * x).to(dtype).to(tl.float32), axis=1) * (1.0 / H)).to(dtype).to(tl.float32)
        rstd = tl.rsqrt((mean_square + eps).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    else:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / H) + eps)
    y = x * rstd[:, None]
    if CASTING == "llama" or CASTING == "none":
        y = y.to(dtype).to(tl.float32)
    return y, rstd


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    x_stride,
    residual_stride,
    num_rows,
    eps,
    offset,
    H: tl.constexpr,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_H)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    out = (rows * H)[:, None] + cols[None, :]
    x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + (rows * residual_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        total = (x + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + out, total, mask=mask)
        x = total.to(tl.float32)  # the model normalises the sum as it was rounded

    y, rstd = normalise(x, eps, dtype, H, CASTING)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    if weight_ptr is not None:
        y *= load_scale(weight_ptr, cols, offset, H, CASTING)
    tl.store(y_ptr + out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_backward_kernel(
    dy_ptr,
    total_grad_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    dx_ptr,
    partial_ptr,
    dy_stride,
    total_grad_stride,
    x_stride,
    num_rows,
    offset,
    H: tl.constexpr,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # Adding the rows of a tile goes across warps when a row is short, so there it is left to the end.
    SUM_LATE: tl.constexpr = ROWS == 1 or BLOCK_H <= 1024
    cols = tl.arange(0, BLOCK_H)
    if weight_ptr is not None:
        scale = load_scale(weight_ptr, cols, offset, H, CASTING)
    if partial_ptr is not None:
        dweight = tl.zeros((ROWS if SUM_LATE else 1, BLOCK_H), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        x_hat = x.to(tl.float32) * rstd
        dy = dy.to(tl.float32)
        if dx_ptr is not None:
            g = dy
            if weight_ptr is not None:
                g = dy * scale
            projection = tl.sum(g * x_hat, axis=1)[:, None] * (1.0 / H)
            dx = rstd * (g - x_hat * projection)
            if total_grad_ptr is not None:
                total_grad_tile = total_grad_ptr + (rows * total_grad_stride)[:, None] + cols[None, :]
                dx += tl.load(total_grad_tile, mask=mask, other=0.0).to(tl.float32)
            tl.store(dx_ptr + (rows * H)[:, None] + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            if SUM_LATE:
                dweight += dy * x_hat
            else:
                dweight += tl.sum(dy * x_hat, axis=0)[None, :]
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0) * H + cols, tl.sum(dweight, axis=0), mask=cols < H)


def backward_config(hidden_size: int, device: torch.device) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel.

    The memory of a Hopper GPU needs about 26 KB in flight on every multiprocessor, and a bf16 row of 4096 with its
    gradient is 16 KB: one row at a time leaves it waiting. So two tiles are fetched while a third is computed, and
    several programs share a multiprocessor so that one computes while another reduces; more of them would only write
    more partial weight gradients (two a multiprocessor are 1 % of a 16384-row input).

    The scale, the row, its gradient and the weight gradient stay in registers. 16 numbers a thread need up to 128
    registers, 32 need that many from 16384 on too (16 warps), where a part of the scale spills: it is read back from
    L1, while the next rows are on their way.
    """
    block = next_power_of_2(hidden_size)
    if block <= 1024:
        return NormConfig(rows=min(128, 2048 // block), num_warps=4, num_stages=3, programs_per_sm=3)
    num_warps = min(16, block // 512) if block <= 16384 else 32
    stages = 3 if block < 16384 else 1  # a row of 16384 is enough in flight by itself, and buffers cost it registers
    return NormConfig(rows=1, num_warps=num_warps, num_stages=stages, programs_per_sm=max(1, 16 // num_warps))


def output_dtype(x: torch.Tensor, weight: torch.Tensor | None, casting: str) -> torch.dtype:
    """Dtype of RMSNorm's result: what torch's promotion gives where `casting` multiplies by the weight last."""
    return (
        torch.promote_types(x.dtype, weight.dtype) if weight is not None and casting in ("llama", "none") else x.dtype
    )


def launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Runs the forward kernel; gives `y`, the sum of `x` and `residual` (None without one), and fp32 `rstd`."""
    hidden_size, order = x.shape[-1], memory_order(x)
    y = empty_in_order(x, order, output_dtype(x, weight, casting))
    total = None if residual is None else empty_in_order(x, order, x.dtype)
    rstd = empty_row_values(x, order)
    if x.numel() == 0:
        return y, total, rstd
    rows = as_rows(x, order)
    residual_rows = None if residual is None else as_rows(residual, order)
    config = fit_config(forward_config(hidden_size, x.device), hidden_size, x.element_size(), x.device)
    with on_device(x):
        _rms_norm_forward_kernel[(cdiv(rows.shape[0], config.rows),)](
            rows,
            residual_rows,
            weight if weight is None else weight.contiguous(),
            as_rows(y, order),
            None if total is None else as_rows(total, order),
            as_row_values(rstd, order),
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            rows.shape[0],
            eps,
            offset,
            H=hidden_size,
            CASTING=casting,
            ROWS=config.rows,
            BLOCK_H=next_power_of_2(hidden_size),
            num_warps=config.num_warps,
        )
    return y, total, rstd


def launch_backward(
    dy: torch.Tensor,
    total_grad: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the backward kernels; gives `dx` (with `total_grad` added) and `dweight`, empty where not needed."""
    hidden_size, order = x.shape[-1], memory_order(x)
    dx, dweight = empty_gradients(x, weight, needs_dx, needs_dweight)
    if x.numel() == 0:
        return dx, dweight.zero_()
    rows, dy_rows = as_rows(x, order), as_rows(dy, order)
    total_grad_rows = None if total_grad is None else as_rows(total_grad, order)
    streams = [tensor for tensor in (rows, dy_rows, total_grad_rows) if tensor is not None]
    bytes_per_column = sum(tensor.element_size() for tensor in streams)
    config = fit_config(backward_config(hidden_size, x.device), hidden_size, bytes_per_column, x.device)
    tiles = cdiv(rows.shape[0], config.rows)
    programs = min(tiles, num_sms(x.device) * config.programs_per_sm)
    partial = x.new_empty(1, programs, hidden_size, dtype=torch.float32) if needs_dweight else None
    with on_device(x):
        _rms_norm_backward_kernel[(programs,)](
            dy_rows,
            total_grad_rows,
            rows,
            weight if weight is None else weight.contiguous(),
            as_row_values(rstd, order),
            as_rows(dx, order) if needs_dx else None,
            partial,
            dy_rows.stride(0),
            0 if total_grad_rows is None else total_grad_rows.stride(0),
            rows.stride(0),
            rows.shape[0],
            offset,
            H=hidden_size,
            CASTING=casting,
            ROWS=config.rows,
            BLOCK_H=next_power_of_2(hidden_size),
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
        if partial is not None:
            column_sum(partial, dweight)
    return dx, dweight


def empty_gradients(
    x: torch.Tensor, weight: torch.Tensor | None, needs_dx: bool, needs_dweight: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """New gradients of x and weight, empty where not needed; what `launch_backward` allocates."""
    dx = empty_in_order(x, memory_order(x), x.dtype) if needs_dx else x.new_empty(0)
    return dx, weight.new_empty(weight.shape) if weight is not None and needs_dweight else x.new_empty(0)


def check_casting(name: str, casting: str) -> None:
    """Raises ValueError unless `casting` is one of `CASTINGS`."""
    if casting not in CASTINGS:
        raise ValueError(f"`casting` of {name} is {casting!r}; it must be one of {', '.join(map(repr, CASTINGS))}.")
