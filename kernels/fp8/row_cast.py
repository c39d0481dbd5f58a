"""Casts to fp8 (e4m3), scaled so that the largest magnitude of a row, or of a whole matrix, becomes 448.

    codes = round(x * 448 / amax)        scale = amax / 448        x ~ codes * scale

`cast_rows` has a scale for each row: a token of an activation, an output feature of a weight. `cast_scaled_rows` first
multiplies each column by a factor. `cast_transposed` has one scale, and writes the transpose: fp8 matmuls of Hopper
read both operands along the sum, so the gradient of the input needs W^T. The scales are those of torchao's rowwise
recipes without their rounding to powers of two.

A row with an infinity or a NaN gets an infinite scale, so that nothing computed from it is finite: no value is clamped
in silence.

Bytes for a bf16 element: 3. The rows are read once; the whole matrix twice, first for its largest magnitude.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.norms.launch import MAX_HIDDEN_SIZE, as_rows, forward_tiles
from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton, use_triton

E4M3_MAX = 448.0
_LEAST = 1e-12  # magnitude that a row is scaled by, as in torchao: a row of zeros has codes of zero
_TILE = 64


@triton.jit
def e4m3(scaled):
    """fp32 numbers to e4m3; what rounding pushed above 448 becomes 448."""
    return tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)


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
    """ROWS rows of H columns: their largest magnitude, their scale, and their codes."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK_H)[None, :]
    inside = (rows < num_rows) & (columns < H)
    x = tl.load(x_ptr + rows * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        x *= tl.load(factors_ptr + columns, mask=columns < H, other=0.0)
    magnitude = tl.where(x == x, tl.abs(x), float("inf"))
    largest = tl.maximum(tl.max(magnitude, axis=1, keep_dims=True), 1e-12)
    most = tl.full(largest.shape, 448.0, tl.float32)
    tl.store(codes_ptr + rows * H + columns, e4m3(x * tl.div_rn(most, largest)), mask=inside)
    tl.store(scales_ptr + rows, tl.div_rn(largest, most), mask=rows < num_rows)


@triton.jit
def _cast_transposed_kernel(x_ptr, codes_ptr, largest_ptr, num_rows, num_columns, TILE: tl.constexpr):
    """A tile of the codes of a contiguous matrix, transposed."""
    rows = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    largest = tl.maximum(tl.load(largest_ptr), 1e-12)
    factor = tl.div_rn(448.0, largest)
    x = tl.load(x_ptr + rows[:, None] * num_columns + columns[None, :], mask=inside).to(tl.float32)
    codes = tl.trans(e4m3(x * factor))
    tl.store(codes_ptr + columns[:, None] * num_rows + rows[None, :], codes, mask=tl.trans(inside))


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
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=x.device)
    programs, options = forward_tiles(x)
    operands = x, x if factors is None else factors, codes, scales, x.stride(0), num_rows
    with on_device(x):
        _cast_rows_kernel[(programs,)](*operands, HAS_FACTORS=factors is not None, **options)
    return codes, scales


def cast_transposed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The transpose of `x` in fp8, with one scale.

    Args:
        x: (N, K), contiguous, in bf16, fp16 or fp32.

    Returns:
        The codes, float8_e4m3fn, (K, N), contiguous; and the scale, fp32, of no dimension.
    """
    if not use_triton(x) or not x.numel():
        return cast_transposed_reference(x)
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32)
    num_rows, columns = x.shape
    codes = torch.empty((columns, num_rows), dtype=torch.float8_e4m3fn, device=x.device)
    grid = cdiv(num_rows, _TILE), cdiv(columns, _TILE)
    with on_device(x):
        _cast_transposed_kernel[grid](x, codes, largest, num_rows, columns, TILE=_TILE)
    return codes, _scale(largest)


def cast_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast_rows` in plain torch."""
    wide = x.float()
    largest = wide.abs().nan_to_num(nan=float("inf"), posinf=float("inf")).amax(1, keepdim=True) if x.shape[1] else wide
    return _codes(wide, largest), _scale(largest)


def cast_transposed_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`cast_transposed` in plain torch."""
    wide = x.float()
    largest = torch.linalg.vector_norm(wide, float("inf"))
    return _codes(wide, largest).t().contiguous(), _scale(largest)


# With a tensor of 448, as torch multiplies by the reciprocal of a number, or by that of the tensor, and rounds twice.
def _codes(wide: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    factor = torch.full_like(largest, E4M3_MAX) / largest.clamp(min=_LEAST)
    return (wide * factor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _scale(largest: torch.Tensor) -> torch.Tensor:
    return largest.clamp(min=_LEAST) / torch.full_like(largest, E4M3_MAX)
