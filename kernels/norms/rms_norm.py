"""RMSNorm over the last dimension, with the roundings of the model families that use it.

Formula (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467), for one row of `x` with hidden size H:

    rstd = 1 / sqrt(mean(x^2) + eps)        x_hat = x * rstd        y = x_hat * (offset + weight)

and, with g = dy * (offset + weight),

    dx = rstd * (g - x_hat * mean(g * x_hat))        dweight = sum over rows of dy * x_hat

Forward reads x and writes y (4 bytes per element in bf16); backward reads x and dy and writes dx (6 bytes). Saved for
backward: x, weight and rstd (fp32, one per row). Each program of a persistent grid sums its share of the weight
gradient in fp32 registers, and a second, small kernel adds the shares in a fixed order: no atomics, so every run gives
the same bits.

The kernels can also add a residual before the norm, which `fused_add_rms_norm` uses: they then read the residual too,
write the sum, and in the backward add the gradient of the sum to dx.

With `fp8` the forward writes y in fp8 as well (1 byte per element), the bits that `cast_rows` makes of y in bf16, for
the linear layers that read y next (`kernels/fp8/shared_cast.py`).

Shapes: x (..., hidden_size); H hidden_size, rows of all leading dimensions.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.fp8.linear import has_fp8
from liger_trainer.kernels.fp8.row_cast import codes_of, empty_cast, magnitude, scale_of
from liger_trainer.kernels.fp8.shared_cast import drop, may_share, share
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
    check_norm_arguments,
    has_elements,
    next_power_of_2,
    on_device,
    reference_of,
    tl,
    triton,
)

CASTINGS = ("llama", "gemma", "olmo2", "none")


@triton.jit
def scale_of_weight(weight, offset, CASTING: tl.constexpr):
    """Offset + weight in fp32, rounded to the dtype of the weight except for "gemma"."""
    scale = weight.to(tl.float32) + offset
    if CASTING != "gemma":
        scale = scale.to(weight.dtype).to(tl.float32)
    return scale


@triton.jit
def load_scale(weight_ptr, cols, offset, H: tl.constexpr, CASTING: tl.constexpr):
    """The `scale_of_weight` of all columns, as (1, BLOCK_H)."""
    weight = tl.load(weight_ptr + cols, mask=cols < H, other=0.0)
    return scale_of_weight(weight, offset, CASTING)[None, :]


@triton.jit
def times_rstd(x, rstd, dtype: tl.constexpr, CASTING: tl.constexpr):
    """``x * rstd`` in fp32, rounded to `dtype` where `CASTING` does so before the weight."""
    y = x * rstd
    if CASTING == "llama" or CASTING == "none":
        y = y.to(dtype).to(tl.float32)
    return y


@triton.jit
def normalise(x, eps, dtype: tl.constexpr, H: tl.constexpr, CASTING: tl.constexpr):
    """The rows of the fp32 tile `x` divided by their root mean square, rounded as `CASTING` says, and the rstds."""
    if CASTING == "none":
        mean_square = (tl.sum((x * x).to(dtype).to(tl.float32), axis=1) * (1.0 / H)).to(dtype).to(tl.float32)
        rstd = tl.rsqrt((mean_square + eps).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    else:
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / H) + eps)
    return times_rstd(x, rstd[:, None], dtype, CASTING), rstd


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    total_ptr,
    rstd_ptr,
    codes_ptr,
    scales_ptr,
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
    """Normalises ROWS rows."""
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
        x = total.to(tl.float32)  # the model normalises the rounded sum

    y, rstd = normalise(x, eps, dtype, H, CASTING)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    if weight_ptr is not None:
        y *= load_scale(weight_ptr, cols, offset, H, CASTING)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + out, y, mask=mask)
    if codes_ptr is not None:
        rounded = y.to(tl.float32)
        largest = tl.max(magnitude(rounded, mask), axis=1, keep_dims=True)
        # As many codes to a thread as it has numbers of y; more, for wider stores, would pass through shared memory.
        places = tl.max_contiguous(codes_ptr + out, (1, 8))
        tl.store(places, codes_of(rounded, largest), mask=mask)
        tl.store(scales_ptr + rows[:, None], scale_of(largest), mask=(rows < num_rows)[:, None])


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
    """Computes dx of every num_programs-th tile of ROWS rows, and this program's share of dweight."""
    # When a row is short, summing the rows of a tile crosses warps, so that sum waits until the end.
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


def backward_config(hidden_size: int) -> NormConfig:
    """Tile, warps, stages and persistent grid of the backward kernel.

    A Hopper GPU needs about 26 KB of loads in flight on every multiprocessor, and a bf16 row of 4096 with its gradient
    is 16 KB, so one row at a time leaves the memory idle. Two tiles are therefore fetched while a third is computed,
    and several programs share a multiprocessor so that one computes while another reduces. More programs would only
    write more partial weight gradients (two per multiprocessor are 1 % of a 16384-row input).

    The scale, the row, its gradient and the weight gradient stay in registers. 16 elements per thread need up to 128
    registers; so do 32 from 16384 columns on (16 warps), where part of the scale spills and is read back from L1 while
    the next rows are loading.
    """
    block = next_power_of_2(hidden_size)
    if block <= 1024:
        return NormConfig(rows=min(128, 2048 // block), num_warps=4, num_stages=3, programs_per_sm=3)
    num_warps = min(16, block // 512) if block <= 16384 else 32
    stages = 3 if block < 16384 else 1  # a row of 16384 alone keeps enough loads in flight, and buffers cost registers
    return NormConfig(rows=1, num_warps=num_warps, num_stages=stages, programs_per_sm=max(1, 16 // num_warps))


def output_dtype(x: torch.Tensor, weight: torch.Tensor | None, casting: str) -> torch.dtype:
    """Dtype of RMSNorm's result: where `casting` multiplies by the weight last, the one that torch promotes to."""
    if weight is None or casting not in ("llama", "none"):
        return x.dtype
    return torch.promote_types(x.dtype, weight.dtype)


def launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    fp8: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Runs the forward kernel and returns y, x + residual (None without a residual), and rstd in fp32.

    With `fp8` it shares y in fp8, where y is in bf16 and contiguous.
    """
    order = memory_order(x)
    y = empty_in_order(x, order, output_dtype(x, weight, casting))
    total = None if residual is None else empty_in_order(x, order, x.dtype)
    rstd = empty_row_values(x, order)
    if not has_elements(x):
        return y, total, rstd
    rows = as_rows(x, order)
    residual_rows = None if residual is None else as_rows(residual, order)
    codes = scales = None
    if fp8 and y.dtype == torch.bfloat16 and order is None:
        drop()
        codes, scales = empty_cast(rows)
    programs, options = forward_tiles(rows)
    with on_device(x):
        _rms_norm_forward_kernel[(programs,)](
            rows,
            residual_rows,
            weight if weight is None else weight.contiguous(),
            y,
            total,
            rstd,
            codes,
            scales,
            rows.stride(0),
            0 if residual_rows is None else residual_rows.stride(0),
            rows.shape[0],
            eps,
            offset,
            CASTING=casting,
            **options,
        )
    if codes is not None and scales is not None:
        share(y, (codes, scales))
    return y, total, rstd


def launch_backward(
    dy: torch.Tensor,
    total_grad: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    casting: str,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the backward kernels and returns dx (with `total_grad` added) and dweight; see `empty_gradients`."""
    hidden_size, order = x.shape[-1], memory_order(x)
    dx, dweight = empty_gradients(needed, x, weight)
    if not has_elements(x):
        return dx, dweight.zero_()
    rows, dy_rows = as_rows(x, order), as_rows(dy, order)
    total_grad_rows = None if total_grad is None else as_rows(total_grad, order)
    programs, options = backward_tiles(backward_config(hidden_size), rows, dy_rows, total_grad_rows)
    partial = x.new_empty(1, programs, hidden_size, dtype=torch.float32) if dweight.numel() else None
    with on_device(x):
        _rms_norm_backward_kernel[(programs,)](
            dy_rows,
            total_grad_rows,
            rows,
            weight if weight is None else weight.contiguous(),
            as_row_values(rstd, order),
            dx if needed[0] else None,
            partial,
            dy_rows.stride(0),
            0 if total_grad_rows is None else total_grad_rows.stride(0),
            rows.stride(0),
            rows.shape[0],
            offset,
            CASTING=casting,
            **options,
        )
        if partial is not None:
            column_sum(partial, dweight)
    return dx, dweight


def unknown_casting(name: str, casting: str) -> ValueError:
    """The error for a `casting` that is none of `CASTINGS`."""
    return ValueError(f"`casting` of {name} is {casting!r}; it must be one of {', '.join(map(repr, CASTINGS))}.")


@operator("liger_trainer::rms_norm")
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str, fp8: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = launch_forward(x, None, weight, eps, offset, casting, fp8)
    return y, rstd


@operator("liger_trainer::rms_norm_backward")
def _rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    casting: str,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_backward(dy, None, x, weight, rstd, offset, casting, needed)


refuse_second_derivative(_rms_norm_backward, "rms_norm")


def _setup_context(ctx, inputs, output):
    x, weight, _, ctx.offset, ctx.casting, _ = inputs
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, dy, _):
    needed = list(ctx.needs_input_grad[:2])
    gradients = _rms_norm_backward(dy, *ctx.saved_tensors, ctx.offset, ctx.casting, needed)
    return input_gradients(ctx, *where_needed(needed, *gradients))


_rms_norm.register_autograd(_backward, setup_context=_setup_context)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
    fp8: bool = False,
) -> torch.Tensor:
    """RMSNorm over the last dimension: `x / sqrt(mean(x^2) + eps) * (offset + weight)`.

    Statistics are fp32 except with ``casting="none"``; gradients are computed in fp32 with one rounding in every mode.
    The result has the memory layout of `x` (permuted leading dimensions stay permuted, gaps are closed).

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype.
        weight: Weight of shape (hidden_size,), in the dtype of `x` or another one, such as fp32 under autocast. None
            for a norm without a weight, where `offset` has no effect.
        eps: Added to the mean square.
        offset: Added to the weight; 1.0 for Gemma.
        casting: Where the result is rounded to the dtype of `x`.

            - ``"llama"`` (default): the normalised row is rounded, then multiplied by the weight. The result has the
              promoted dtype of `x` and `weight`.
            - ``"gemma"``: everything including `offset + weight` is fp32, the product is rounded.
            - ``"olmo2"``: the normalised row is multiplied by the weight in fp32, the product is rounded (OLMo2,
              GPT-OSS, `torch.nn.RMSNorm`). This is ``"gemma"``, except that a non-zero `offset` is added in the dtype
              of the weight.
            - ``"none"``: no casts; each step (square, mean, rsqrt, product) rounds to the dtype of `x`, as torch does
              on tensors of that dtype. The result has the promoted dtype of `x` and `weight`.
        fp8: The result is read by linear layers in fp8 next: cast it for them in the same pass, if it is in bf16 and
            the GPU has fp8. The result and its gradients are the same.

    Returns:
        Tensor of the shape of `x`, in the dtype of `x` except where `casting` promotes it.

    Raises:
        ValueError: If `weight` does not fit `x` in shape or device, a dtype is not floating point, `x` has no last
            dimension of at least 1, or `casting` is unknown.
    """
    if casting not in CASTINGS:
        raise unknown_casting("rms_norm", casting)
    if not check_norm_arguments("rms_norm", x, weight=weight):
        compute = x if casting == "none" else x.to(torch.promote_types(x.dtype, torch.float32))
        x_hat = compute * torch.rsqrt(compute.pow(2).mean(-1, keepdim=True) + eps)
        if weight is None:
            return x_hat.to(x.dtype)
        if casting == "gemma":
            return (x_hat * (offset + weight.to(compute.dtype))).to(x.dtype)
        scale = weight + offset if offset else weight
        return (scale * x_hat).to(x.dtype) if casting == "olmo2" else scale * x_hat.to(x.dtype)
    fp8 = fp8 and has_fp8(x.device) and may_share(x)
    return _rms_norm(x, weight, eps, offset, casting, fp8)[0]


rms_norm_reference = reference_of(rms_norm, "check_norm_arguments")
