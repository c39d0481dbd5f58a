"""The row kernels of softmax and sparsemax; the formulas are in `_row_softmax`."""

from __future__ import annotations

from liger_trainer.kernels.runtime import tl, triton


@triton.jit
def _row_ends(rows, num_cols, CAUSAL: tl.constexpr):
    """Where each row ends, and the same rounded up to 16, by which the compiler knows that loads may be wide."""
    ends = rows * 0 + num_cols
    reach = ends
    if CAUSAL:
        position = (rows % num_cols).to(tl.int32)
        ends = position + 1
        reach = (position // 16 + 1) * 16
    return ends, reach


@triton.jit
def _load(pointers, columns, inside, ends, reach, CAUSAL: tl.constexpr, other):
    """A tile of rows in fp32, `other` where they have ended."""
    if CAUSAL:
        tile = tl.load(pointers, mask=inside & (columns < reach), other=other).to(tl.float32)
        return tl.where(columns < ends, tile, other)
    return tl.load(pointers, mask=inside, other=other).to(tl.float32)


@triton.jit
def _load_result(pointers, lse_ptr, lse, columns, inside, ends, reach, CAUSAL: tl.constexpr):
    """A tile of the result in fp32: as it was stored, or unrounded, from the scores and their log-sum-exp."""
    if lse_ptr is not None:
        x = _load(pointers, columns, inside, ends, reach, CAUSAL, float("-inf"))
        return tl.exp2((x - lse) * 1.4426950408889634)
    return _load(pointers, columns, inside, ends, reach, CAUSAL, 0.0)


@triton.jit
def _mass_above(z, tau):
    """What lies above the threshold, and 1 where something does."""
    above = tl.maximum(z - tau, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return above, (above > 0.0).to(tl.float32)


@triton.jit
def _threshold(z, tau):
    """The sparsemax threshold of each row of `z`, whose largest number is 0, from a `tau` that is not beyond it."""
    support = tl.zeros_like(tau)
    step = tau
    unsettled = 1
    while unsettled > 0:
        previous = support
        mass, support = _mass_above(z, tau)
        mass = tl.sum(mass, axis=1, keep_dims=True)
        support = tl.sum(support, axis=1, keep_dims=True)
        step = tau + (mass - 1.0) / support
        tau = tl.maximum(tau, step)  # never lower, whatever was rounded: so the support shrinks and the loop ends
        unsettled = tl.sum(tl.sum((support != previous).to(tl.int32), axis=1), axis=0)
    return step  # the last one, with the support settled, takes back what the earlier ones rounded away


@triton.jit(do_not_specialize=["num_rows"])
def forward_kernel(
    x_ptr,
    y_ptr,
    lse_ptr,  # None where it is not wanted
    x_stride,
    num_rows,
    num_cols,
    SPARSE: tl.constexpr,
    CAUSAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
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
        # One number a thread is enough of a start; over more of them, Triton 3.6 compiles for minutes.
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
            decay = tl.exp2(-tl.abs(x - peaks) * LOG2E)  # one exponential a number, whichever of the two is larger
            sums = tl.where(x > peaks, sums * decay + 1.0, sums + decay)
            peaks = tl.where(x > peaks, x, peaks)
        top = tl.max(peaks, axis=0)
        mass = tl.sum(sums * tl.exp2((peaks - top) * LOG2E), axis=0)
        scale = 1.0 / mass
        if lse_ptr is not None:
            tl.store(lse_ptr + row, top + tl.log(mass))

    for tile in tl.range(0, tiles):  # backwards: the last tiles are still in cache
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
    for tile in tl.range(0, tiles):  # backwards: the last tiles are still in cache
        columns = (tiles - 1 - tile) * BLOCK + lanes
        y = _load_result(y_ptr + columns, lse_ptr, lse, columns, columns < num_cols, ends, reach, CAUSAL)
        dy = _load(dy_ptr + columns, columns, columns < num_cols, ends, reach, CAUSAL, 0.0)
        dx = _in_support(y, dy - mean) if SPARSE else y * (dy - mean)
        tl.store(dx_ptr + columns, dx.to(dx_ptr.dtype.element_ty), mask=columns < num_cols)
    if CAUSAL:
        _store_zeros(dx_ptr, tiles * BLOCK, num_cols, BLOCK)


@triton.jit
def _store_zeros(row_ptr, start, stop, BLOCK: tl.constexpr):
    for first in tl.range(start, stop, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        zeros = tl.zeros([BLOCK], row_ptr.dtype.element_ty)
        tl.store(row_ptr + columns, zeros, mask=columns < stop)
