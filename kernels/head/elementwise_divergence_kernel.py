"""The Triton kernel of `elementwise_divergence` and its launch."""

from __future__ import annotations

import torch

from liger_trainer.kernels.fast_math import has_lg2, log2
from liger_trainer.kernels.head.logit_rows import row_config, row_layout, row_start
from liger_trainer.kernels.runtime import on_device, tl, triton


@triton.jit
def _terms(x, y, beta, eps, DIVERGENCE: tl.constexpr, LG2: tl.constexpr):
    """The summands of one tile and their derivatives with respect to `x`."""
    LN2: tl.constexpr = 0.6931471805599453
    LOG2E: tl.constexpr = 1.4426950408889634
    if DIVERGENCE == "tvd":
        gap = x - y
        value = 0.5 * tl.abs(gap)
        slope = tl.where(gap > 0.0, 0.5, tl.where(gap < 0.0, -0.5, gap))  # 0 at a tie, NaN for NaN
    elif DIVERGENCE == "kl":
        value = tl.where((y == 0.0) & (x == x), 0.0, y * (LN2 * log2(tl.maximum(y, eps), LG2) - x))
        slope = -y
    elif DIVERGENCE == "kl_log" or DIVERGENCE == "forward_kl":
        p = tl.exp2(y * LOG2E)
        value = tl.where((p == 0.0) & (x == x), 0.0, p * (y - x))
        slope = -p
    elif DIVERGENCE == "reverse_kl":
        q = tl.exp2(x * LOG2E)
        value = tl.where((q == 0.0) & (y == y), 0.0, q * (x - y))
        slope = value + q
    else:
        FLOOR: tl.constexpr = -1.0e30  # for minus infinity, which times a probability of 0 must be 0
        x = tl.where(x < FLOOR, FLOOR, x)
        y = tl.where(y < FLOOR, FLOOR, y)
        q, p = tl.exp2(x * LOG2E), tl.exp2(y * LOG2E)
        log_m = LN2 * log2((1.0 - beta) * q + beta * p, LG2)
        slope = (1.0 - beta) * q * (x - log_m)
        value = slope + beta * p * (y - log_m)
    return value, slope


@triton.jit
def _is_power_of_two(number):
    """Whether a multiplication by the fp32 `number` changes exponents alone; not for 0, infinity and NaN."""
    bits = tl.abs(number).to(tl.int32, bitcast=True)
    return ((bits & 0x007FFFFF) == 0) & (bits != 0) & (bits != 0x7F800000)


@triton.jit
def _multiply_row(row_ptr, factor, vocab_size, BLOCK: tl.constexpr):
    for start in tl.range(0, vocab_size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < vocab_size
        value = tl.load(row_ptr + columns, mask=mask, other=0.0).to(tl.float32) * factor
        tl.store(row_ptr + columns, value.to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _elementwise_divergence_kernel(
    x_ptr,
    x_inner_rows,
    x_outer_stride,
    x_inner_stride,
    y_ptr,
    y_inner_rows,
    y_outer_stride,
    y_inner_stride,
    label_ptr,
    grad_ptr,
    scale_ptr,
    expected_ptr,
    sum_ptr,
    out_ptr,
    vocab_size,
    ignore_index,
    beta,
    eps,
    DIVERGENCE: tl.constexpr,
    LG2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row; what of `grad`, `scale`, `expected`, `sum` and `out` there is says what is done, as in `launch`."""
    row = tl.program_id(0).to(tl.int64)
    coefficient = 1.0
    if scale_ptr is not None:
        upstream = tl.load(grad_ptr).to(tl.float32)
        if expected_ptr is not None:
            expected = tl.load(expected_ptr)
            if upstream == expected:
                return
            if out_ptr.dtype.element_ty != tl.float16:  # where small gradients have lost bits
                ratio = tl.div_rn(upstream, expected)
                if _is_power_of_two(ratio):
                    _multiply_row(out_ptr + row * vocab_size, ratio, vocab_size, BLOCK)
                    return
        coefficient = upstream * tl.load(scale_ptr)
    x_ptr = row_start(x_ptr, row, x_inner_rows, x_outer_stride, x_inner_stride)
    y_ptr = row_start(y_ptr, row, y_inner_rows, y_outer_stride, y_inner_stride)
    if out_ptr is not None:
        out_ptr += row * vocab_size
    lanes = tl.arange(0, BLOCK)
    if label_ptr is not None:
        label = tl.load(label_ptr + row).to(tl.int64)
        if label == ignore_index:
            if out_ptr is not None:
                for start in tl.range(0, vocab_size, BLOCK):
                    columns = start + lanes
                    zeros = tl.zeros([BLOCK], dtype=out_ptr.dtype.element_ty)
                    tl.store(out_ptr + columns, zeros, mask=columns < vocab_size)
            if sum_ptr is not None:
                tl.store(sum_ptr + row, 0.0)
            return
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        columns = start + lanes
        mask = columns < vocab_size
        x = tl.load(x_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        value, slope = _terms(x, y, beta, eps, DIVERGENCE, LG2)
        if out_ptr is not None:
            if grad_ptr is None:
                out = value
            elif scale_ptr is None:
                out = slope * tl.load(grad_ptr + row * vocab_size + columns, mask=mask, other=0.0).to(tl.float32)
            else:
                out = slope * coefficient
            tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=mask)
        if sum_ptr is not None:
            sums += tl.where(mask, value, 0.0)
    if sum_ptr is not None:
        tl.store(sum_ptr + row, tl.sum(sums, 0))


def launch(
    x: torch.Tensor,
    y: torch.Tensor,
    labels: torch.Tensor | None,
    divergence: str,
    beta: float,
    eps: float,
    ignore_index: int,
    *,
    sums: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    grad: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    expected: torch.Tensor | None = None,
) -> None:
    """Fills `sums` `(N,)` with the divergences of the rows, and `out` `(N, V)`.

    `out` becomes the summands, or with `grad`, shaped as it, the gradient of x for that of the summands. With `scale`,
    where both are 0-d, it becomes the gradient of x for that of ``sums.sum() * scale``. With `expected` it is that for
    `expected` already: where `grad` is the same nothing is done, where it is 2**k times that, fp16 aside, `out` is
    multiplied, and elsewhere it is made anew.
    """
    vocab_size = x.shape[-1]
    rows = x.numel() // vocab_size
    if rows:
        block, warps, _ = row_config(vocab_size)
        with on_device(x):
            _elementwise_divergence_kernel[(rows,)](
                x,
                *row_layout(x),
                y,
                *row_layout(y),
                labels,
                grad,
                scale,
                expected,
                sums,
                out,
                vocab_size,
                ignore_index,
                beta,
                eps,
                DIVERGENCE=divergence,
                LG2=has_lg2(x),
                BLOCK=block,
                num_warps=warps,
            )
