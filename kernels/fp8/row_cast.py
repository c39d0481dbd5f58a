"""Casts to fp8 (e4m3), scaled so that the largest magnitude of a row, or of a whole matrix, becomes 448.

    codes = round(x * 448 / amax)        scale = amax / 448        x ~ codes * scale

fp8 matmuls of Hopper read both operands along the sum, so a gradient needs transposed operands:

| | as it lies | transposed |
|---|---|---|
| a scale for each row of the result | `cast_rows` | `cast_columns` |
| one scale | `cast_whole` | `cast_transposed` |

A row of an operand is a token of an activation, a feature of a weight; `cast_scaled_rows` first multiplies each column
by a factor. With one scale there may be another dtype, e5m2, whose largest number is 57,344, and each row of the result
is given the same scale. The transposed ones are filled up with zeros to a multiple of 16 columns, as a matmul asks of
what it sums over. The scales are those of torchao's recipes without their rounding to powers of two.

A row with an infinity or a NaN gets a scale that is not finite, so that nothing computed from it is finite: no value is
clamped in silence.

Bytes for a bf16 element: 3 for `cast_rows`, which reads once; 5 for the others, which first read for the magnitudes.

Shapes: M or N rows, K columns; a transposed cast is (K, N), with N rounded up to a multiple of 16.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from liger_trainer.kernels.rows import as_rows, forward_tiles
from liger_trainer.kernels.runtime import MAX_HIDDEN_SIZE, cdiv, on_device, tl, triton, use_triton

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MULTIPLE = 16
"""The sizes of an fp8 matmul must be multiples of this, except the rows of its first operand."""

_LEAST = 1e-12  # magnitude that a row is scaled by, as in torchao: a row of zeros has codes of zero
_TILE = 64


@triton.jit
def e4m3(scaled):
    """fp32 numbers to e4m3; what rounding pushed above 448 becomes 448."""
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def magnitude(x, inside):
    """What the largest magnitude of a row is taken of: infinite for a NaN, 0 outside of the row."""
    return tl.where(inside, tl.where(x == x, tl.abs(x), float("inf")), 0.0)


@triton.jit
def codes_of(x, largest):
    """The codes of fp32 numbers whose largest magnitude is `largest`."""
    largest = tl.maximum(largest, 1e-12)
    return e4m3(x * tl.div_rn(tl.full(largest.shape, 448.0, tl.float32), largest))


@triton.jit
def scale_of(largest):
    """The scale that goes with these codes."""
    largest = tl.maximum(largest, 1e-12)
    return tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))


@triton.jit
def _cast_rows_kernel(
    x_ptr,
    factors_ptr,  # read if HAS_FACTORS
    codes_ptr,
    scales_ptr,
    row_stride,
    num_rows,
    HAS_FACTORS: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """ROWS rows of H columns."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_H)[None, :]
    inside = (rows < num_rows) & (columns < H)
    x = tl.load(x_ptr + rows * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        x *= tl.load(factors_ptr + columns, mask=columns < H, other=0.0)
    largest = tl.max(magnitude(x, inside), axis=1, keep_dims=True)
    tl.store(codes_ptr + rows * H + columns, codes_of(x, largest), mask=inside)
    tl.store(scales_ptr + rows, scale_of(largest), mask=rows < num_rows)


@triton.jit
def _cast_tiles_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    largest_ptr,
    row_stride,
    num_rows,
    num_columns,
    filled_rows,
    MOST: tl.constexpr,
    PER_COLUMN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
):
    """A tile of the codes of a matrix, transposed or not, for the largest magnitude of each column, or of them all.

    The first tile of each row of the result writes its scales.
    """
    rows = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    x = tl.load(x_ptr + rows[:, None] * row_stride + columns[None, :], mask=inside, other=0.0)
    if PER_COLUMN:
        largest = tl.load(largest_ptr + columns, mask=columns < num_columns, other=1.0)
    else:
        largest = tl.full((TILE,), 1.0, tl.float32) * tl.load(largest_ptr)
    largest = tl.where(largest < 1e-12, 1e-12, largest)  # not tl.maximum, which would drop a NaN
    most = tl.full((TILE,), MOST, tl.float32)
    factor, scales = tl.div_rn(most, largest), tl.div_rn(largest, most)
    scaled = (tl.trans(x) if TRANSPOSED else x).to(tl.float32) * factor[:, None]
    codes = tl.minimum(tl.maximum(scaled, -MOST), MOST).to(codes_ptr.dtype.element_ty)
    if TRANSPOSED:
        filled = (columns < num_columns)[:, None] & (rows < filled_rows)[None, :]
        tl.store(codes_ptr + columns[:, None] * filled_rows + rows[None, :], codes, mask=filled)
        if tl.program_id(0) == 0:
            tl.store(scales_ptr + columns, scales, mask=columns < num_columns)
    else:
        tl.store(codes_ptr + rows[:, None] * num_columns + columns[None, :], codes, mask=inside)
        if tl.program_id(1) == 0:
            tl.store(scales_ptr + rows, scales, mask=rows < num_rows)


def empty_cast(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised codes and scales of rows, (M, K), as `cast_rows` returns them."""
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    return codes, torch.empty((rows.shape[0], 1), dtype=torch.float32, device=rows.device)


def cast_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in fp8, with a scale for each row.

    Args:
        x: (M, K) in bf16, fp16 or fp32, of any strides.

    Returns:
        The codes, float8_e4m3fn, (M, K), contiguous; and the scales, fp32, (M, 1), so that x ~ codes * scales.
    """
    return _cast_rows(x, None)


def cast_scaled_rows(x: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x * factors``, multiplied in fp32, in fp8, with a scale for each row.

    Args:
        x: (M, K) in bf16, fp16 or fp32, of any strides.
        factors: One for each column, fp32, contiguous, K elements.

    Returns:
        As `cast_rows`.
    """
    return _cast_rows(x, factors)


def _cast_rows(x: torch.Tensor, factors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    x = as_rows(x, None)
    num_rows, columns = x.shape
    if not use_triton(x) or columns > MAX_HIDDEN_SIZE or not x.numel():
        return cast_rows_reference(x if factors is None else x.float() * factors.view(1, -1))
    codes, scales = empty_cast(x)
    programs, options = forward_tiles(x)
    operands = x, x if factors is None else factors, codes, scales, x.stride(0), num_rows
    with on_device(x):
        _cast_rows_kernel[(programs,)](*operands, HAS_FACTORS=factors is not None, **options)
    return codes, scales


def cast_whole(
    x: torch.Tensor, dtype: torch.dtype = E4M3, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x` in fp8, with one scale.

    Args:
        x: (M, K) in bf16, fp16 or fp32, of any strides.
        dtype: Dtype of the codes, float8_e4m3fn or float8_e5m2.
        largest: `largest_magnitude` of `x`, where it is known.

    Returns:
        The codes, (M, K), contiguous; and the scale for each row, fp32, (M, 1).
    """
    return _cast_tiles(x, largest_magnitude(x) if largest is None else largest, dtype, transposed=False)


def cast_transposed(
    x: torch.Tensor, dtype: torch.dtype = E4M3, largest: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose of `x` in fp8, with one scale.

    Args:
        x: (N, K) in bf16, fp16 or fp32, of any strides.
        dtype: See `cast_whole`.
        largest: See `cast_whole`.

    Returns:
        The codes, (K, N), contiguous, with N rounded up to a multiple of 16; and the scale for each row, fp32, (K, 1).
    """
    return _cast_tiles(x, largest_magnitude(x) if largest is None else largest, dtype, transposed=True)


def cast_columns(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose of `x` in fp8, with a scale for each column of `x`.

    Args:
        x: (N, K) in bf16, fp16 or fp32, of any strides.

    Returns:
        The codes, float8_e4m3fn, (K, N), contiguous, with N rounded up to a multiple of 16; and the scales, fp32,
        (K, 1).
    """
    return _cast_tiles(x, largest_magnitude(x, dim=0), E4M3, transposed=True)


def largest_magnitude(x: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The largest magnitude of `x`, or of each column with `dim` 0, in fp32; not finite where an element is not."""
    return torch.linalg.vector_norm(x, float("inf"), dim, dtype=torch.float32)


def _cast_tiles(
    x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if not use_triton(x) or not x.numel():
        return cast_tiles_reference(x, largest, dtype, transposed)
    x = as_rows(x, None)
    num_rows, columns = x.shape
    filled = cdiv(num_rows, MULTIPLE) * MULTIPLE if transposed else num_rows
    shape = (columns, filled) if transposed else x.shape
    codes = torch.empty(shape, dtype=dtype, device=x.device)
    scales = torch.empty((shape[0], 1), dtype=torch.float32, device=x.device)
    grid = cdiv(filled, _TILE), cdiv(columns, _TILE)
    options = {"MOST": torch.finfo(dtype).max, "PER_COLUMN": largest.dim(), "TRANSPOSED": transposed, "TILE": _TILE}
    with on_device(x):
        _cast_tiles_kernel[grid](x, codes, scales, largest, x.stride(0), num_rows, columns, filled, **options)
    return codes, scales


def cast_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast_rows` in plain torch."""
    wide = x.float()
    largest = wide.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).amax(1, keepdim=True) if x.shape[1] else wide
    return _codes(wide, largest), _scale(largest)


def cast_tiles_reference(
    x: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast_whole`, `cast_transposed` and `cast_columns` in plain torch, for the magnitudes of `largest_magnitude`."""
    wide = F.pad(x.float(), (0, 0, 0, -len(x) % MULTIPLE)) if transposed else x.float()
    codes = _codes(wide, largest, dtype)
    codes = codes.t().contiguous() if transposed else codes
    scales = _scale(largest, dtype).view(-1, 1).expand(len(codes), 1)
    return codes, scales.contiguous()


# With a tensor of 448, as torch multiplies by the reciprocal of a number, or by that of the tensor, and rounds twice.
def _codes(wide: torch.Tensor, largest: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    most = torch.finfo(dtype).max
    factor = torch.full_like(largest, most) / largest.clamp(min=_LEAST)
    return (wide * factor).clamp(-most, most).to(dtype)


def _scale(largest: torch.Tensor, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return largest.clamp(min=_LEAST) / torch.full_like(largest, torch.finfo(dtype).max)
