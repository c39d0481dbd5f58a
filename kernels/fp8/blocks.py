"""Products in fp8 of a weight with a scale for each block of 128 x 128, as DeepSeek's, Qwen's and GLM's FP8 has it.

::

    y = sum over g of (X8_g @ W8_g^T) * scales_x[:, g] * scales_w[:, g]         groups g of 128 columns

X is cast with a scale for each row and group, so a scale is the same for all summands of a group's product, and the
weight's codes and scales are taken as they were published. A block is one of the transpose too: ``dY @ W`` is the same
product of the transposed codes and scales.

The product is torch's (`scaled_mm`), which is cuBLAS's and there on Hopper alone, from cuBLAS 12.9 on. It takes the
scales of X in memory as (groups, rows), and those of W as (blocks of rows, groups), with the groups filled up to a
multiple of 4. The products of a group are summed in fp32. A bias is added to the rounded result.

On a CPU the operands are multiplied in fp32, for tests.

Bytes for a bf16 element of a cast: 3, and 4 for 128 of them.

Shapes: M tokens, K inputs, N outputs; K is a multiple of 128, and N of a weight too.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F

from liger_trainer.kernels.fp8.row_cast import E4M3, MULTIPLE, cast_rows_reference, codes_of, magnitude, scale_of
from liger_trainer.kernels.fp8.shared_cast import Cast
from liger_trainer.kernels.rows import as_rows
from liger_trainer.kernels.runtime import cdiv, on_device, tl, triton, use_triton

BLOCK = 128
"""Rows and columns of a block of a weight, and columns of a group of an input."""

_ROWS = 32  # of a program of the cast
_SCALES = 4  # cuBLAS reads so many scales of a weight at once
_HOPPER = 9
_TRIED = 18, 384, 640  # sizes of the product that is tried: rows to be filled up, 3 and 5 blocks
_AGREES = 2**-6  # relative error of that product, which is rounded to bf16


@triton.jit
def _cast_groups_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,  # (groups, filled_rows)
    row_stride,
    num_rows,
    num_columns,
    filled_rows,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS rows of one group of columns; zeros and the least scale below the last row."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    group = tl.program_id(1)
    columns = group * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, filled = rows < num_rows, rows < filled_rows
    x = tl.load(x_ptr + rows * row_stride + columns, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(magnitude(x, inside), axis=1, keep_dims=True)
    tl.store(codes_ptr + rows * num_columns + columns, codes_of(x, largest), mask=filled)
    tl.store(scales_ptr + group.to(tl.int64) * filled_rows + rows, scale_of(largest), mask=filled)


def cast_groups(x: torch.Tensor) -> Cast:
    """`x` in fp8, with a scale for each row and group of 128 columns.

    Args:
        x: (M, K) in bf16, fp16 or fp32, of any strides; K is a multiple of 128.

    Returns:
        The codes, float8_e4m3fn, (M', K), contiguous, where M' is M rounded up to a multiple of 16 and rows that are
        added are zeros; and the scales, fp32, (M', K / 128), in memory column by column. A group with an infinity or a
        NaN gets a scale that is not finite.
    """
    x = as_rows(x, None)
    num_rows, columns = x.shape
    if not use_triton(x) or not x.numel():
        return cast_groups_reference(x)
    filled, groups = cdiv(num_rows, MULTIPLE) * MULTIPLE, columns // BLOCK
    codes = torch.empty((filled, columns), dtype=E4M3, device=x.device)
    scales = torch.empty((groups, filled), dtype=torch.float32, device=x.device)
    with on_device(x):
        _cast_groups_kernel[(cdiv(filled, _ROWS), groups)](
            *(x, codes, scales, x.stride(0), num_rows, columns, filled), ROWS=_ROWS, BLOCK=BLOCK, num_warps=4
        )
    return codes, scales.t()


def cast_groups_reference(x: torch.Tensor) -> Cast:
    """`cast_groups` in plain torch."""
    filled = F.pad(x, (0, 0, 0, -len(x) % MULTIPLE))
    num_rows, groups = len(filled), filled.shape[1] // BLOCK
    codes, scales = cast_rows_reference(filled.reshape(-1, BLOCK))
    by_columns = scales.new_empty(groups, num_rows).copy_(scales.view(num_rows, groups).t())
    return codes.view(filled.shape), by_columns.t()


def block_product(left: Cast, right: Cast, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b.T + bias`` in bf16.

    Args:
        left: The cast of a, (M, K), by `cast_groups`.
        right: Codes of b, float8_e4m3fn, (N, K), contiguous; and its scales, fp32, (N / 128, K / 128), of any strides.
        bias: (N,) in bf16, or None.

    Returns:
        (M', N), with the rows that the cast has added.
    """
    (a, a_scales), (b, b_scales) = left, right
    if a.device.type == "cpu":
        return block_product_reference(left, right, bias)
    missing = -b_scales.shape[1] % _SCALES
    grid = (F.pad(b_scales, (0, missing)) if missing else b_scales).contiguous()
    groups, blocks = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    y = F.scaled_mm(a, b.t(), a_scales, groups, grid.t(), blocks, output_dtype=torch.bfloat16)
    return y if bias is None else y.add_(bias)


def block_product_reference(left: Cast, right: Cast, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`block_product` in plain torch: the product of what the codes stand for, in fp32."""
    (a, a_scales), (b, b_scales) = left, right
    with torch.autocast(a.device.type, enabled=False):
        y = (a.float() * a_scales.repeat_interleave(BLOCK, 1)) @ of_blocks(b, b_scales).t()
    y = y.to(torch.bfloat16)
    return y if bias is None else y + bias


def of_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What codes, float8_e4m3fn, (N, K), with scales in fp32, (N / 128, K / 128), stand for, in fp32."""
    return codes.float() * scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


@functools.cache
def obstacle_to_blocks(device: torch.device) -> str:
    """Why `block_product` does not run on `device`, one for which `has_fp8` is True; empty if it does.

    On Hopper a small product is tried once, for a torch or a cuBLAS that refuses it, or computes something else.
    """
    if device.type == "cpu":
        return ""
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return "products with scales of blocks are Hopper's alone"
    return _trial(device)


@torch.no_grad()
def _trial(device: torch.device) -> str:
    """Why a small product is not what it should be; empty if it is."""
    tokens, outputs, inputs = _TRIED
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator, device=device)
    codes = torch.randn(outputs, inputs, generator=generator, device=device).to(E4M3)
    scales = torch.rand(outputs // BLOCK, inputs // BLOCK, generator=generator, device=device) + 0.5
    left = cast_groups(x)
    try:
        y = block_product(left, (codes, scales)).float()
    except (RuntimeError, ValueError) as error:
        return f"torch refuses products with scales of blocks ({str(error).partition(chr(10))[0]})"
    expected = block_product_reference(left, (codes, scales)).float()
    near = bool((y - expected).norm() <= _AGREES * expected.norm())
    return "" if near else "this torch has other results of products with scales of blocks"
