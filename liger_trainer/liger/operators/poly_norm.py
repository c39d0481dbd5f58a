"""PolyNorm: a polynomial activation of normalised powers, used instead of a gate in feed-forward blocks.

Formula (Zhuo et al. 2024, https://arxiv.org/abs/2411.03884), for one row of `x` with hidden size H:

    y = w_0 n_3 + w_1 n_2 + w_2 n_1 + bias        n_p = x^p * r_p        r_p = 1 / sqrt(mean(x^2p) + eps)

and, with S_p the sum over the row of dy * n_p,

    dx = sum over p of w * r_p * p x^(p-1) * (dy - n_p * S_p / H)
    dw = sum over rows of S_p (in the order of the weights)        dbias = sum of dy

Forward reads x and writes y (4 bytes per element in bf16); backward reads x and dy and writes dx (6 bytes). Saved for
backward: x, weight, bias and the three r_p of each row, in fp32. The gradients of weight and bias are summed as in
`rms_norm`, without atomics.

Shapes: x and y (N, H), weight (3,), bias (1,), the r_p (N, 3).
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import differentiate_norm
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import (
    NormConfig,
    as_row_values,
    as_rows,
    backward_tiles,
    column_sum,
    empty_gradients,
    empty_in_order,
    empty_row_values,
    forward_tiles,
    memory_order,
)
from liger_trainer.kernels.runtime import (
    check_all_dtensors,
    check_norm_arguments,
    has_elements,
    next_power_of_2,
    on_device,
    reference_of,
    tl,
    triton,
    use_triton,
)


@triton.jit(do_not_specialize=["num_rows"])
def _poly_norm_forward_kernel(
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
    """Writes y and r_3, r_2 and r_1 of ROWS rows."""
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
def _poly_norm_backward_kernel(
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
    """Computes dx of every num_programs-th tile of ROWS rows, and this program's share of dweight and dbias."""
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


def backward_config(hidden_size: int) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel.

    As for RMSNorm; the powers and four reductions of a row take the registers of its column sums.
    """
    block = next_power_of_2(hidden_size)
    if block <= 1024:
        return NormConfig(rows=min(128, 2048 // block), num_warps=4, num_stages=3, programs_per_sm=4)
    num_warps = min(16, block // 512) if block <= 16384 else 32
    return NormConfig(rows=1, num_warps=num_warps, num_stages=3, programs_per_sm=max(1, 16 // num_warps))


@operator("liger_trainer::poly_norm")
def _poly_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    order = memory_order(x)
    y = empty_in_order(x, order, x.dtype)
    rstd_3, rstd_2, rstd_1 = (empty_row_values(x, order) for _ in range(3))
    if not has_elements(x):
        return y, rstd_3, rstd_2, rstd_1
    rows = as_rows(x, order)
    programs, options = forward_tiles(rows)
    with on_device(x):
        _poly_norm_forward_kernel[(programs,)](
            rows,
            weight.contiguous(),
            bias,
            y,
            rstd_3,
            rstd_2,
            rstd_1,
            rows.stride(0),
            rows.shape[0],
            eps,
            **options,
        )
    return y, rstd_3, rstd_2, rstd_1


@operator("liger_trainer::poly_norm_backward")
def _poly_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rstd_3: torch.Tensor,
    rstd_2: torch.Tensor,
    rstd_1: torch.Tensor,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias = empty_gradients(needed, x, weight, bias)
    if not has_elements(x):
        return dx, dweight.zero_(), dbias.zero_()
    order = memory_order(x)
    rows, dy_rows = as_rows(x, order), as_rows(dy, order)
    programs, options = backward_tiles(backward_config(x.shape[-1]), rows, dy_rows)
    weight_partial = x.new_empty(1, programs, 3, dtype=torch.float32) if needed[1] else None
    bias_partial = x.new_empty(1, programs, 1, dtype=torch.float32) if dbias.numel() else None
    with on_device(x):
        _poly_norm_backward_kernel[(programs,)](
            dy_rows,
            rows,
            weight.contiguous(),
            as_row_values(rstd_3, order),
            as_row_values(rstd_2, order),
            as_row_values(rstd_1, order),
            dx if needed[0] else None,
            weight_partial,
            bias_partial,
            dy_rows.stride(0),
            rows.stride(0),
            rows.shape[0],
            **options,
        )
        if weight_partial is not None:
            column_sum(weight_partial, dweight)
        if bias_partial is not None:
            column_sum(bias_partial, dbias)
    return dx, dweight, dbias


differentiate_norm(_poly_norm, _poly_norm_backward, "poly_norm", (0, 1, 2))


def poly_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """PolyNorm over the last dimension: `w[0] * norm(x^3) + w[1] * norm(x^2) + w[2] * norm(x) + bias`.

    Here `norm(u) = u / sqrt(mean(u^2) + eps)`. Everything is computed in fp32 and rounded once. The result has the
    memory layout of `x` (permuted leading dimensions stay permuted, gaps are closed).

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype; above 2e6 the sixth power overflows fp32.
        weight: The three weights, of the third power first, shape (3,). Its dtype may differ from that of `x`.
        bias: One number, of shape () or (1,), or None (default) for 0.
        eps: Added to each mean square.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        ValueError: If `weight` is not three and `bias` not one floating point number on the device of `x`, or `x` is
            not of a floating dtype or has no last dimension of at least 1.
    """
    on_triton = check_norm_arguments("poly_norm", x)
    check_all_dtensors("poly_norm", x, weight=weight, bias=bias)
    for argument, parameter, size in (("weight", weight, 3), ("bias", bias, 1)):
        if parameter is None:
            continue
        fits = parameter.numel() == size and parameter.dim() <= 1
        if not fits or not parameter.is_floating_point() or parameter.device != x.device:
            raise ValueError(
                f"`{argument}` of poly_norm has shape {tuple(parameter.shape)}, dtype {parameter.dtype} and is on "
                f"{parameter.device}; give a floating point tensor of shape ({size},) on {x.device}, where `x` is."
            )
    if on_triton and use_triton(weight) and (bias is None or use_triton(bias)):
        return _poly_norm(x, weight, bias, eps)[0]
    compute = torch.promote_types(x.dtype, torch.float32)
    powers = [x.to(compute) ** power for power in (3, 2, 1)]
    norms = [power * torch.rsqrt(power.pow(2).mean(-1, keepdim=True) + eps) for power in powers]
    y = sum(w * norm for w, norm in zip(weight.to(compute), norms))
    return (y if bias is None else y + bias.to(compute)).to(x.dtype)


poly_norm_reference = reference_of(poly_norm, "check_norm_arguments")
