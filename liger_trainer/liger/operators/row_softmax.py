"""Softmax and sparsemax of rows, with or without a causal mask: kernels and operators.

With x a row, dy the gradient of its result y, and [c] 1 where the condition c holds and 0 elsewhere:

    softmax:    y = exp(x - max x) / sum exp(x - max x)          dx = y * (dy - sum(dy * y))
    sparsemax:  y = max(x - tau, 0), tau such that sum(y) = 1    dx = s * (dy - sum(dy * s) / sum(s)),  s = [y > 0]

Sparsemax usually sorts the row to find tau. Here tau is the root of the convex, decreasing function
f(tau) = sum(max(x - tau, 0)) - 1, found by Newton's method from the left: tau += f(tau) / |{x > tau}|. Such steps never
pass the root, so the support {x > tau} only shrinks, and once it stops shrinking tau is exact. This takes at most as
many steps as there are elements, in practice two to six, with the row in registers. A good start saves steps: neither
max x - 1 nor the root of a part of the row is past the root of the whole row, and the largest elements of all lanes are
a part that holds most of the support.

With the causal mask, rows belong to square matrices and row i of each ends at column i: elements past it are not read,
count as -inf, and are written as 0.

Bytes moved for (N, V) elements of b bytes: 2*N*V*b forward, 3*N*V*b backward; 1.5 and 2 with the mask. Saved for
backward: y. A half-precision y is rounded, so that dx differs from that of attention weights rounded after an fp32
softmax. In half precision, softmax with the mask therefore saves x and an fp32 log-sum-exp per row, from which the
backward recomputes y unrounded, for the same bytes moved. Rows too long for registers are read tile by tile, mostly
from L2: twice for softmax, twice and once per step for sparsemax.

Shapes: N rows, V columns; x, y and their gradients (N, V), or (..., V, V) with the causal mask.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import as_rows, device_limits
from liger_trainer.kernels.runtime import cdiv, has_elements, next_power_of_2, on_device, tl, triton


@triton.jit
def _row_ends(rows, num_cols, CAUSAL: tl.constexpr):
    """Where each row ends, and that rounded up to 16, from which the compiler infers that loads may be wide."""
    ends = rows * 0 + num_cols
    reach = ends
    if CAUSAL:
        position = (rows % num_cols).to(tl.int32)
        ends = position + 1
        reach = (position // 16 + 1) * 16
    return ends, reach


@triton.jit
def _load(pointers, columns, inside, ends, reach, CAUSAL: tl.constexpr, other):
    """A tile of rows in fp32, `other` past their ends."""
    if CAUSAL:
        tile = tl.load(pointers, mask=inside & (columns < reach), other=other).to(tl.float32)
        return tl.where(columns < ends, tile, other)
    return tl.load(pointers, mask=inside, other=other).to(tl.float32)


@triton.jit
def _load_result(pointers, lse_ptr, lse, columns, inside, ends, reach, CAUSAL: tl.constexpr):
    """A tile of the result in fp32: as stored, or, with `lse_ptr`, recomputed unrounded from the scores."""
    if lse_ptr is not None:
        x = _load(pointers, columns, inside, ends, reach, CAUSAL, float("-inf"))
        return tl.exp2((x - lse) * 1.4426950408889634)
    return _load(pointers, columns, inside, ends, reach, CAUSAL, 0.0)


@triton.jit
def _mass_above(z, tau):
    """max(z - tau, 0), and 1 where that is positive."""
    above = tl.maximum(z - tau, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return above, (above > 0.0).to(tl.float32)


@triton.jit
def _threshold(z, tau):
    """The sparsemax threshold of each row of `z`, whose maximum is 0, from a `tau` that is not past it."""
    support = tl.zeros_like(tau)
    step = tau
    unsettled = 1
    while unsettled > 0:
        previous = support
        mass, support = _mass_above(z, tau)
        mass = tl.sum(mass, axis=1, keep_dims=True)
        support = tl.sum(support, axis=1, keep_dims=True)
        step = tau + (mass - 1.0) / support
        tau = tl.maximum(tau, step)  # never lower, whatever the rounding, so the support shrinks and the loop ends
        unsettled = tl.sum(tl.sum((support != previous).to(tl.int32), axis=1), axis=0)
    return step  # the last step, on the final support, corrects the rounding of the earlier ones


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    x_ptr,
    y_ptr,
    lse_ptr,  # None: no log-sum-exp is stored
    x_stride,
    num_rows,
    num_cols,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Writes the results of ROWS rows, which fit in registers."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < num_cols)
    ends, reach = _row_ends(rows, num_cols, CAUSAL)
    x = _load(x_ptr + rows * x_stride + columns, columns, inside, ends, reach, CAUSAL, float("-inf"))
    if SPARSE:
        peaks = tl.max(tl.reshape(x, [ROWS, BLOCK // LANES, LANES]), axis=1)
        top = tl.max(peaks, axis=1, keep_dims=True)
        x -= top
        tau = _threshold(peaks - top, tl.full([ROWS, 1], -1.0, tl.float32))
        tau = _threshold(x, tau)
        y, _ = _mass_above(x, tau)
    else:
        top = tl.max(x, axis=1, keep_dims=True)
        y = tl.exp2((x - top) * 1.4426950408889634)
        mass = tl.sum(y, axis=1, keep_dims=True)
        y *= 1.0 / mass
        if lse_ptr is not None:
            tl.store(lse_ptr + rows, top + tl.log(mass), mask=rows < num_rows)
    if CAUSAL:
        y = tl.where(columns < ends, y, 0.0)
    tl.store(y_ptr + rows * num_cols + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def backward_kernel(
    dy_ptr,
    y_ptr,
    lse_ptr,
    dx_ptr,
    dy_stride,
    y_stride,
    num_rows,
    num_cols,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the gradients of ROWS rows, which fit in registers."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (rows < num_rows) & (columns < num_cols)
    ends, reach = _row_ends(rows, num_cols, CAUSAL)
    lse = 0.0
    if lse_ptr is not None:
        lse = tl.load(lse_ptr + rows, mask=rows < num_rows, other=0.0)
    y = _load_result(y_ptr + rows * y_stride + columns, lse_ptr, lse, columns, inside, ends, reach, CAUSAL)
    dy = _load(dy_ptr + rows * dy_stride + columns, columns, inside, ends, reach, CAUSAL, 0.0)
    if SPARSE:
        dx = _in_support(y, dy)
        support = tl.sum(_in_support(y, 1.0), axis=1, keep_dims=True)
        dx = _in_support(y, dx - tl.sum(dx, axis=1, keep_dims=True) / support)
    else:
        dx = y * (dy - tl.sum(dy * y, axis=1, keep_dims=True))
    tl.store(dx_ptr + rows * num_cols + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _in_support(y, value):
    """`value` where `y` is not 0 (so also where it is NaN), else 0."""
    return tl.where(y == 0.0, 0.0, value)


@triton.jit
def long_forward_kernel(
    x_ptr, y_ptr, lse_ptr, x_stride, num_cols, SPARSE: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Writes the result of one row, reading it tile by tile."""
    LOG2E: tl.constexpr = 1.4426950408889634
    LOWEST: tl.constexpr = -3.0e38  # finite, so that differences of running maxima are never inf - inf
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * num_cols
    lanes = tl.arange(0, BLOCK)
    ends, reach = _row_ends(row, num_cols, CAUSAL)
    tiles = tl.cdiv(ends, BLOCK).to(tl.int32)
    if SPARSE:
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, tiles * BLOCK, BLOCK):
            columns = start + lanes
            x = _load(x_ptr + columns, columns, columns < num_cols, ends, reach, CAUSAL, float("-inf"))
            peaks = tl.maximum(peaks, x)
        # One element per thread is a good enough start; with more, Triton 3.6 compiles for minutes.
        peaks = tl.max(tl.reshape(peaks, [1, BLOCK // 16, 16]), axis=2)
        top = tl.max(peaks)
        tau = tl.max(_threshold(peaks - top, tl.full([1, 1], -1.0, tl.float32)))
        support = 0.0
        step = tau
        unsettled = 1
        while unsettled > 0:
            previous = support
            masses = tl.zeros([BLOCK], tl.float32)
            supports = tl.zeros([BLOCK], tl.float32)
            for start in tl.range(0, tiles * BLOCK, BLOCK):
                columns = start + lanes
                x = _load(x_ptr + columns, columns, columns < num_cols, ends, reach, CAUSAL, float("-inf"))
                mass, inside = _mass_above(x - top, tau)
                masses += mass
                supports += inside
            support = tl.sum(supports, axis=0)
            step = tau + (tl.sum(masses, axis=0) - 1.0) / support
            tau = tl.maximum(tau, step)
            unsettled = (support != previous).to(tl.int32)
        tau = step
    else:
        peaks = tl.full([BLOCK], LOWEST, tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, tiles * BLOCK, BLOCK):
            columns = start + lanes
            x = _load(x_ptr + columns, columns, columns < num_cols, ends, reach, CAUSAL, float("-inf"))
            decay = tl.exp2(-tl.abs(x - peaks) * LOG2E)  # one exponential per element, whichever is larger
            sums = tl.where(x > peaks, sums * decay + 1.0, sums + decay)
            peaks = tl.where(x > peaks, x, peaks)
        top = tl.max(peaks, axis=0)
        mass = tl.sum(sums * tl.exp2((peaks - top) * LOG2E), axis=0)
        scale = 1.0 / mass
        if lse_ptr is not None:
            tl.store(lse_ptr + row, top + tl.log(mass))

    for tile in tl.range(0, tiles):  # from the last tile, which is still in cache
        columns = (tiles - 1 - tile) * BLOCK + lanes
        x = _load(x_ptr + columns, columns, columns < num_cols, ends, reach, CAUSAL, float("-inf")) - top
        y = _mass_above(x, tau)[0] if SPARSE else tl.exp2(x * LOG2E) * scale
        if CAUSAL:
            y = tl.where(columns < ends, y, 0.0)
        tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty), mask=columns < num_cols)
    if CAUSAL:
        _store_zeros(y_ptr, tiles * BLOCK, num_cols, BLOCK)


@triton.jit
def long_backward_kernel(
    dy_ptr,
    y_ptr,
    lse_ptr,
    dx_ptr,
    dy_stride,
    y_stride,
    num_cols,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the gradient of one row, reading it tile by tile."""
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * y_stride
    dx_ptr += row * num_cols
    lse = 0.0
    if lse_ptr is not None:
        lse = tl.load(lse_ptr + row)
    lanes = tl.arange(0, BLOCK)
    ends, reach = _row_ends(row, num_cols, CAUSAL)
    tiles = tl.cdiv(ends, BLOCK).to(tl.int32)
    products = tl.zeros([BLOCK], tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, tiles * BLOCK, BLOCK):
        columns = start + lanes
        y = _load_result(y_ptr + columns, lse_ptr, lse, columns, columns < num_cols, ends, reach, CAUSAL)
        dy = _load(dy_ptr + columns, columns, columns < num_cols, ends, reach, CAUSAL, 0.0)
        if SPARSE:
            products += _in_support(y, dy)
            weights += _in_support(y, 1.0)
        else:
            products += dy * y
    mean = tl.sum(products, axis=0)
    if SPARSE:
        mean /= tl.sum(weights, axis=0)
    for tile in tl.range(0, tiles):  # from the last tile, which is still in cache
        columns = (tiles - 1 - tile) * BLOCK + lanes
        y = _load_result(y_ptr + columns, lse_ptr, lse, columns, columns < num_cols, ends, reach, CAUSAL)
        dy = _load(dy_ptr + columns, columns, columns < num_cols, ends, reach, CAUSAL, 0.0)
        dx = _in_support(y, dy - mean) if SPARSE else y * (dy - mean)
        tl.store(dx_ptr + columns, dx.to(dx_ptr.dtype.element_ty), mask=columns < num_cols)
    if CAUSAL:
        _store_zeros(dx_ptr, tiles * BLOCK, num_cols, BLOCK)


@triton.jit
def _store_zeros(row_ptr, start, stop, BLOCK: tl.constexpr):
    """Zeros columns `start` to `stop` of a row."""
    for first in tl.range(start, stop, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], row_ptr.dtype.element_ty)
        tl.store(row_ptr + columns, zeros, mask=columns < stop)


MAX_IN_REGISTERS = 32768
"""Longest row that one program holds in registers; a longer one is read tile by tile."""

_LONG_TILE = 8192  # 16 elements for each thread of 16 warps


def _launch_options(num_cols: int, sparse: bool, causal: bool, per_thread: int, device: torch.device) -> dict[str, Any]:
    """Constants and options of a launch, ROWS not for long rows: rows of a tile, its columns (a power of two), warps.

    With fewer warps per row, reductions wait less for each other, and several programs on a multiprocessor keep it busy
    meanwhile. Sparsemax, which reduces the row in every step, therefore has 64 elements per thread, softmax 32, and the
    backward 32 of each of its two inputs.
    """
    options = {"SPARSE": sparse, "CAUSAL": causal}
    if num_cols > MAX_IN_REGISTERS:
        return options | {"BLOCK": _LONG_TILE, "num_warps": 16}
    block = max(16, next_power_of_2(num_cols))
    rows = max(1, 1024 // block)
    num_warps = min(max(1, rows * block // (32 * per_thread)), device_limits(device).max_warps)
    return options | {"ROWS": rows, "BLOCK": block, "num_warps": num_warps}


def launch_forward(
    x: torch.Tensor, y: torch.Tensor, sparse: bool, causal: bool, lse: torch.Tensor | None = None
) -> None:
    """Writes softmax or sparsemax of the rows of `x` to the contiguous `y`, and their log-sum-exp to `lse` if given."""
    rows = as_rows(x, None)
    num_rows, num_cols = rows.shape
    options = _launch_options(num_cols, sparse, causal, 64 if sparse else 32, x.device)
    with on_device(x):
        if num_cols > MAX_IN_REGISTERS:
            long_forward_kernel[(num_rows,)](rows, y, lse, rows.stride(0), num_cols, **options)
            return
        lanes = min(options["BLOCK"], 256 * options["num_warps"])
        grid = (cdiv(num_rows, options["ROWS"]),)
        forward_kernel[grid](rows, y, lse, rows.stride(0), num_rows, num_cols, LANES=lanes, **options)


def launch_backward(
    dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, sparse: bool, causal: bool, lse: torch.Tensor | None = None
) -> None:
    """Writes the gradient of the rows to the contiguous `dx`.

    `y` is the result of the forward; with the `lse` of the forward, it is its input instead.
    """
    rows, results = as_rows(dy, None), as_rows(y, None)
    num_rows, num_cols = rows.shape
    tensors, strides = (rows, results, lse, dx), (rows.stride(0), results.stride(0))
    options = _launch_options(num_cols, sparse, causal, 32, dy.device)
    with on_device(dy):
        if num_cols > MAX_IN_REGISTERS:
            long_backward_kernel[(num_rows,)](*tensors, *strides, num_cols, **options)
        else:
            backward_kernel[(cdiv(num_rows, options["ROWS"]),)](*tensors, *strides, num_rows, num_cols, **options)


def _recomputes(x: torch.Tensor, sparse: bool, causal: bool) -> bool:
    """Whether the backward recomputes the result from `x`."""
    return causal and not sparse and x.dtype != torch.float32


@operator("liger_trainer::row_softmax")
def _row_softmax(x: torch.Tensor, sparse: bool, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, contiguous, and the fp32 log-sum-exp of each row, without elements where the backward needs none."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    recomputes = _recomputes(x, sparse, causal)
    lse = torch.empty(x.shape[:-1] if recomputes else 0, dtype=torch.float32, device=x.device)
    if has_elements(y):
        launch_forward(x, y, sparse, causal, lse if recomputes else None)
    return y, lse


@operator("liger_trainer::row_softmax_backward")
def _row_softmax_backward(
    dy: torch.Tensor, saved: torch.Tensor, lse: torch.Tensor, sparse: bool, causal: bool
) -> torch.Tensor:
    dx = torch.empty(saved.shape, dtype=saved.dtype, device=saved.device)
    if has_elements(dx):
        launch_backward(dy, saved, dx, sparse, causal, lse if _recomputes(saved, sparse, causal) else None)
    return dx


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, ctx.sparse, ctx.causal = inputs
    y, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(x if _recomputes(*inputs) else y, lse)


def _backward(ctx: Any, dy: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
    return _row_softmax_backward(dy, *ctx.saved_tensors, ctx.sparse, ctx.causal), None, None


_row_softmax.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivative(_row_softmax_backward, "softmax and sparsemax")


def row_softmax(x: torch.Tensor, sparse: bool, causal: bool) -> torch.Tensor:
    """Softmax or sparsemax over the last dimension, contiguous. Call `softmax` or `sparsemax`, which check `x`.

    The gradient of the causal softmax is that before rounding to half precision.
    """
    return _row_softmax(x, sparse, causal)[0]
