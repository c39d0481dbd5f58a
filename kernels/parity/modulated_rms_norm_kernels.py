"""The kernels of modulated RMSNorm (adaLN), and how they are launched.

Tokens come in groups of `rows_per_group` successive rows that share a row of scale and shift. With
w = offset + weight, n = rms_norm(x) and m = 1 + scale, forward writes y = n * m + shift, and backward

    g = dy * m * w        dx = rstd * (g - x_hat * mean(g * x_hat))
    dscale = w * P        dshift = D        dweight = sum over groups of m * P
    P = sum over the rows of the group of dy * x_hat        D = the same sum of dy

so two column sums a group give three gradients. Programs of the persistent grid share the rows of one group, or take
several groups each where there are many; modulation of every token on its own (one row a group) is a mode of the
kernel in which all rows are one group and scale is read beside x. No sum uses atomics.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.norms import layer_norm_kernels as _layer_norm_kernels
from liger_trainer.kernels.norms.launch import (
    NormConfig,
    as_row_values,
    as_rows,
    column_sum,
    fit_config,
    forward_config,
)
from liger_trainer.kernels.norms.rms_norm_kernels import load_scale, normalise
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, num_sms, on_device, tl, triton


@triton.jit(do_not_specialize=["num_rows", "rows_per_group"])
def _modulated_rms_norm_forward_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    shift_ptr,
    y_ptr,
    rstd_ptr,
    x_stride,
    scale_stride,
    shift_stride,
    num_rows,
    rows_per_group,
    eps,
    offset,
    H: tl.constexpr,
    CASTING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    groups = rows // rows_per_group
    cols = tl.arange(0, BLOCK_H)
    mask = (rows < num_rows)[:, None] & (cols < H)[None, :]
    x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + (groups * scale_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
    y, rstd = normalise(x, eps, dtype, H, CASTING)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    if weight_ptr is not None:
        y *= load_scale(weight_ptr, cols, offset, H, CASTING)
        if CASTING == "gemma" or CASTING == "olmo2" or weight_ptr.dtype.element_ty == dtype:
            y = y.to(dtype).to(tl.float32)  # the norm's result, as rms_norm rounds it
    else:
        y = y.to(dtype).to(tl.float32)
    y *= 1.0 + scale.to(tl.float32)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + (groups * shift_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
        y += shift.to(tl.float32)
    tl.store(y_ptr + (rows * H)[:, None] + cols[None, :], y.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_groups", "rows_per_group", "splits"])
def _modulated_rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dscale_ptr,
    dshift_ptr,
    dy_stride,
    x_stride,
    scale_stride,
    num_groups,
    rows_per_group,
    splits,
    offset,
    H: tl.constexpr,
    CASTING: tl.constexpr,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # Adding the rows of a tile goes across warps when a row is short, so there it is left to the end.
    SUM_LATE: tl.constexpr = ROWS == 1 or BLOCK_H <= 1024
    SUM_ROWS: tl.constexpr = ROWS if SUM_LATE else 1
    cols = tl.arange(0, BLOCK_H)
    split = tl.program_id(0) % splits
    if dweight_ptr is not None:
        dweight = tl.zeros((SUM_ROWS if PER_ROW else 1, BLOCK_H), tl.float32)
    first_group = tl.program_id(0).to(tl.int64) // splits  # int64, so that offsets of groups are
    for group in range(first_group, num_groups, tl.num_programs(0) // splits):
        if PER_ROW:
            if weight_ptr is not None:
                weight = load_scale(weight_ptr, cols, offset, H, CASTING)
        else:
            group_scale = scale_ptr + group * scale_stride + cols
            factor = 1.0 + tl.load(group_scale, mask=cols < H, other=0.0).to(tl.float32)[None, :]
            if weight_ptr is not None:
                factor *= load_scale(weight_ptr, cols, offset, H, CASTING)
            product_sum = tl.zeros((SUM_ROWS, BLOCK_H), tl.float32)
            dy_sum = tl.zeros((SUM_ROWS, BLOCK_H), tl.float32)
        for tile in tl.range(split, tl.cdiv(rows_per_group, ROWS), splits, num_stages=NUM_STAGES):
            local = tile * ROWS + tl.arange(0, ROWS)
            rows = group * rows_per_group + local
            mask = (local < rows_per_group)[:, None] & (cols < H)[None, :]
            out = (rows * H)[:, None] + cols[None, :]
            x = tl.load(x_ptr + (rows * x_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
            dy = tl.load(dy_ptr + (rows * dy_stride)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
            rstd = tl.load(rstd_ptr + rows, mask=local < rows_per_group, other=0.0)[:, None]
            x_hat = x.to(tl.float32) * rstd
            if PER_ROW:
                if dscale_ptr is not None:
                    dscale = dy * x_hat
                    if weight_ptr is not None:
                        dscale *= weight
                    tl.store(dscale_ptr + out, dscale.to(dscale_ptr.dtype.element_ty), mask=mask)
                scale = tl.load(scale_ptr + (rows * scale_stride)[:, None] + cols[None, :], mask=mask, other=0.0)
                dnorm = dy * (1.0 + scale.to(tl.float32))
                if dweight_ptr is not None:
                    if SUM_LATE:
                        dweight += dnorm * x_hat
                    else:
                        dweight += tl.sum(dnorm * x_hat, axis=0)[None, :]
                g = dnorm
                if weight_ptr is not None:
                    g = dnorm * weight
            else:
                g = dy * factor
                if dweight_ptr is not None or dscale_ptr is not None:
                    if SUM_LATE:
                        product_sum += dy * x_hat
                    else:
                        product_sum += tl.sum(dy * x_hat, axis=0)[None, :]
                if dshift_ptr is not None:
                    if SUM_LATE:
                        dy_sum += dy
                    else:
                        dy_sum += tl.sum(dy, axis=0)[None, :]
            if dx_ptr is not None:
                dx = rstd * (g - x_hat * (tl.sum(g * x_hat, axis=1)[:, None] * (1.0 / H)))
                tl.store(dx_ptr + out, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if not PER_ROW:
            out = (group * splits + split) * H + cols[None, :]
            product = tl.sum(product_sum, axis=0)[None, :]
            if dscale_ptr is not None:
                dscale = product
                if weight_ptr is not None:  # read again: in the loop it would only hold registers
                    dscale = product * load_scale(weight_ptr, cols, offset, H, CASTING)
                tl.store(dscale_ptr + out, dscale.to(dscale_ptr.dtype.element_ty), mask=(cols < H)[None, :])
            if dshift_ptr is not None:
                dshift = tl.sum(dy_sum, axis=0)[None, :]
                tl.store(dshift_ptr + out, dshift.to(dshift_ptr.dtype.element_ty), mask=(cols < H)[None, :])
            if dweight_ptr is not None:
                dweight += product * (1.0 + tl.load(group_scale, mask=cols < H, other=0.0).to(tl.float32)[None, :])
    if dweight_ptr is not None:
        tl.store(dweight_ptr + tl.program_id(0) * H + cols, tl.sum(dweight, axis=0), mask=cols < H)


def backward_config(hidden_size: int, device: torch.device) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel: LayerNorm's, which has as many column sums."""
    return _layer_norm_kernels.backward_config(hidden_size, device)


def launch_forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    shift: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the forward kernel; gives `y`, contiguous, and fp32 `rstd` of shape `x.shape[:-1]`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return y, rstd
    hidden_size = x.shape[-1]
    rows, scale_rows = as_rows(x, None), as_rows(scale, None)
    shift_rows = None if shift is None else as_rows(shift, None)
    config = fit_config(forward_config(hidden_size, x.device), hidden_size, x.element_size(), x.device)
    with on_device(x):
        _modulated_rms_norm_forward_kernel[(cdiv(rows.shape[0], config.rows),)](
            rows,
            weight if weight is None else weight.contiguous(),
            scale_rows,
            shift_rows,
            y,
            rstd,
            rows.stride(0),
            scale_rows.stride(0),
            0 if shift_rows is None else shift_rows.stride(0),
            rows.shape[0],
            rows.shape[0] // scale_rows.shape[0],
            eps,
            offset,
            H=hidden_size,
            CASTING=casting,
            ROWS=config.rows,
            BLOCK_H=next_power_of_2(hidden_size),
            num_warps=config.num_warps,
        )
    return y, rstd


def launch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    scale: torch.Tensor,
    rstd: torch.Tensor,
    offset: float,
    casting: str,
    gradients: list[torch.Tensor],
) -> None:
    """Runs the backward kernels, which fill `gradients` of x, weight, scale and shift; empty ones are not computed."""
    dx, dweight, dscale, dshift = (gradient if gradient.numel() else None for gradient in gradients)
    hidden_size = x.shape[-1]
    rows, dy_rows, scale_rows = (as_rows(tensor, None) for tensor in (x, dy, scale))
    per_row = scale_rows.shape[0] == rows.shape[0]
    streams = (rows, dy_rows, scale_rows) if per_row else (rows, dy_rows)
    bytes_per_column = sum(tensor.element_size() for tensor in streams)
    config = fit_config(backward_config(hidden_size, x.device), hidden_size, bytes_per_column, x.device)

    num_groups = 1 if per_row else scale_rows.shape[0]
    rows_per_group = rows.shape[0] // num_groups
    programs = num_sms(x.device) * config.programs_per_sm
    splits = max(1, min(programs // num_groups, cdiv(rows_per_group, config.rows)))
    programs = splits * min(num_groups, programs)
    sums = [] if per_row or splits == 1 else [tensor for tensor in (dscale, dshift) if tensor is not None]
    partial = x.new_empty(len(sums), num_groups, splits, hidden_size, dtype=torch.float32)
    dweight_partial = None if dweight is None else x.new_empty(1, programs, hidden_size, dtype=torch.float32)
    with on_device(x):
        _modulated_rms_norm_backward_kernel[(programs,)](
            dy_rows,
            rows,
            weight if weight is None else weight.contiguous(),
            scale_rows,
            as_row_values(rstd, None),
            dx,
            dweight_partial,
            partial[0] if sums and dscale is not None else dscale,
            partial[-1] if sums and dshift is not None else dshift,
            dy_rows.stride(0),
            rows.stride(0),
            scale_rows.stride(0),
            num_groups,
            rows_per_group,
            splits,
            offset,
            H=hidden_size,
            CASTING=casting,
            PER_ROW=per_row,
            ROWS=config.rows,
            BLOCK_H=next_power_of_2(hidden_size),
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
        if sums:
            column_sum(partial, *sums)
        if dweight is not None and dweight_partial is not None:
            column_sum(dweight_partial, dweight)
