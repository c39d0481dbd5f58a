"""The kernels of `poly_norm`, and how the backward one is launched."""

from __future__ import annotations

import torch

from liger_trainer.kernels.norms.launch import NormConfig
from liger_trainer.kernels.runtime import next_power_of_2, tl, triton


@triton.jit(do_not_specialize=["num_rows"])
def poly_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rstd_3_ptr,
    rstd_2_ptr,
    rstd_1_ptr,
    x_stride,
    num_rows,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_H)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    square = x * x
    cube = square * x
    rstd_3 = tl.rsqrt(tl.sum(cube * cube, axis=1) * (1.0 / H) + eps)
    rstd_2 = tl.rsqrt(tl.sum(square * square, axis=1) * (1.0 / H) + eps)
    rstd_1 = tl.rsqrt(tl.sum(square, axis=1) * (1.0 / H) + eps)
    tl.store(rstd_3_ptr + rows, rstd_3, mask=rows < num_rows)
    tl.store(rstd_2_ptr + rows, rstd_2, mask=rows < num_rows)
    tl.store(rstd_1_ptr + rows, rstd_1, mask=rows < num_rows)
    y = cube * (tl.load(weight_ptr).to(tl.float32) * rstd_3)[:, None]
    y += square * (tl.load(weight_ptr + 1).to(tl.float32) * rstd_2)[:, None]
    y += x * (tl.load(weight_ptr + 2).to(tl.float32) * rstd_1)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr).to(tl.float32)
    tl.store(y_ptr + (rows * H)[:, None] + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def poly_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    rstd_3_ptr,
    rstd_2_ptr,
    rstd_1_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    dy_stride,
    x_stride,
    num_rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    cols = tl.arange(0, BLOCK_H)
    weight_3 = tl.load(weight_ptr).to(tl.float32)
    weight_2 = tl.load(weight_ptr + 1).to(tl.float32)
    weight_1 = tl.load(weight_ptr + 2).to(tl.float32)
    dweight_3 = tl.zeros((ROWS,), tl.float32)
    dweight_2 = tl.zeros((ROWS,), tl.float32)
    dweight_1 = tl.zeros((ROWS,), tl.float32)
    dbias = tl.zeros((ROWS,), tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0), num_stages=NUM_STAGES):
        rows = tile * ROWS + tl.arange(0, ROWS).to(tl.int64)
        mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
        x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd_3 = tl.load(rstd_3_ptr + rows, mask=rows < num_rows, other=0.0)
        rstd_2 = tl.load(rstd_2_ptr + rows, mask=rows < num_rows, other=0.0)
        rstd_1 = tl.load(rstd_1_ptr + rows, mask=rows < num_rows, other=0.0)
        square = x * x
        sum_3 = tl.sum(dy * square * x, axis=1) * rstd_3
        sum_2 = tl.sum(dy * square, axis=1) * rstd_2
        sum_1 = tl.sum(dy * x, axis=1) * rstd_1
        if dx_ptr is not None:
            dx = (dy - square * x * (rstd_3 * sum_3 * (1.0 / H))[:, None]) * square * (3 * weight_3 * rstd_3)[:, None]
            dx += (dy - square * (rstd_2 * sum_2 * (1.0 / H))[:, None]) * x * (2 * weight_2 * rstd_2)[:, None]
            dx += (dy - x * (rstd_1 * sum_1 * (1.0 / H))[:, None]) * (weight_1 * rstd_1)[:, None]
            tl.store(dx_ptr + (rows * H)[:, None] + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if dweight_ptr is not None:
            dweight_3 += sum_3
            dweight_2 += sum_2
            dweight_1 += sum_1
        if dbias_ptr is not None:
            dbias += tl.sum(dy, axis=1)
    if dweight_ptr is not None:
        partial = dweight_ptr + tl.program_id(0) * 3
        tl.store(partial, tl.sum(dweight_3))
        tl.store(partial + 1, tl.sum(dweight_2))
        tl.store(partial + 2, tl.sum(dweight_1))
    if dbias_ptr is not None:
        tl.store(dbias_ptr + tl.program_id(0), tl.sum(dbias))


def backward_config(hidden_size: int, device: torch.device) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel.

    As RMSNorm's, without its column sums; the powers and four reductions of a row take their registers.
    """
    block = next_power_of_2(hidden_size)
    if block <= 1024:
        return NormConfig(rows=min(128, 2048 // block), num_warps=4, num_stages=3, programs_per_sm=4)
    num_warps = min(16, block // 512) if block <= 16384 else 32
    return NormConfig(rows=1, num_warps=num_warps, num_stages=3, programs_per_sm=max(1, 16 // num_warps))
