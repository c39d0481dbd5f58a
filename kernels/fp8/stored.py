"""A frozen linear layer whose weight is in fp8 (e4m3), with a scale for each output feature, or for each block.

::

    W ~ W8 * s                                      stored: 1 byte an element, and 4 a row
    y  = (X8 @ W8^T) * scales_x * s + b             X8 by token                                 fast accumulation
    dx = (D8 @ W8) * scales_d / 448                 D8 = dy * 448 s by token                    fp32 accumulation

The sum of dx runs over output features, whose scales cannot be taken out of it. So dy is multiplied by them before it
is cast, in the same pass; by 448 s, the largest magnitudes of the rows, as dy * s may be too small to be cast. Hopper
reads both operands along the sum, so W8 is transposed where dx is computed: 2 bytes moved an element, a hundredth of a
step, and memory for one weight while the product runs. A copy that is kept would take as much for every weight, and no
kernel can read W8 as it lies: it would have to transpose each tile again for all rows of dy.

A weight of a published checkpoint may have a scale for each block of 128 x 128 instead, and X8 and D8 then one for each
token and 128 columns (`blocks.py`). Its codes and scales are as they were published, in the dtype that they have.

W has no gradient. So `fp8_stored_linear` saves nothing for the backward, and a checkpoint does not repeat it unless
something after it is saved. Layers with adapters are in `kernels/lora`.

W8 is kept as bytes (uint8), which no cast of a model changes and every process group can send.

Shapes: M tokens, K inputs, N outputs: X (M, K), W (N, K), y (M, N).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.fp8.blocks import block_product, cast_groups, of_blocks
from liger_trainer.kernels.fp8.linear import scaled_product
from liger_trainer.kernels.fp8.row_cast import E4M3_MAX, cast_rows, cast_scaled_rows
from liger_trainer.kernels.fp8.shared_cast import Cast
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast, cdiv, on_device, tl, triton, use_triton

_E4M3 = torch.float8_e4m3fn
_TILE = 128


class Fp8Weight(NamedTuple):
    """A matrix in fp8.

    Args:
        codes: (N, K), contiguous, the bytes of float8_e4m3fn as uint8; N and K are multiples of 16, in blocks of 128.
        scales: (N, 1) for a scale a row, (1, 1) for one of all, or (N / 128, K / 128) for one a block of 128 x 128;
            fp32 or, of a published weight, bf16, fp16 or float8_e8m0fnu. The weight is codes times scales.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.codes.device

    @property
    def in_blocks(self) -> bool:
        """Whether a scale is for a block of 128 x 128, of more than one."""
        rows, columns = self.scales.shape
        return columns > 1 or 1 < rows < self.codes.shape[0]

    @property
    def widened(self) -> Fp8Weight:
        """The same weight with scales in fp32; (N, 1) unless they are of blocks."""
        wide = self.scales.float()
        return self._replace(scales=wide if self.in_blocks else wide.expand(len(self.codes), 1).contiguous())


@triton.jit
def _transpose_kernel(x_ptr, out_ptr, num_rows, num_columns, TILE: tl.constexpr):
    """A tile of a contiguous matrix of bytes, transposed."""
    rows = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    columns = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    x = tl.load(x_ptr + rows[:, None] * num_columns + columns[None, :], mask=inside)
    tl.store(out_ptr + columns[:, None] * num_rows + rows[None, :], tl.trans(x), mask=tl.trans(inside))


def store(weight: torch.Tensor) -> Fp8Weight:
    """`weight`, (N, K) in bf16, fp16 or fp32, in fp8. A row that is not finite gets a scale that is not finite."""
    codes, scales = cast_rows(weight)
    return Fp8Weight(codes.view(torch.uint8), scales)


def dequantize(weight: Fp8Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in a floating dtype, (N, K), rounded once."""
    codes, scales = weight.codes.view(_E4M3), weight.widened.scales
    return (of_blocks(codes, scales) if weight.in_blocks else codes.float() * scales).to(dtype)


def transposed_codes(weight: Fp8Weight) -> torch.Tensor:
    """The codes of the transpose, (K, N), contiguous; of a weight with floating scales."""
    codes, scales = weight
    if not use_triton(scales):
        return codes.t().contiguous()
    num_rows, num_columns = codes.shape
    out = codes.new_empty(num_columns, num_rows)
    grid = cdiv(num_rows, _TILE), cdiv(num_columns, _TILE)
    with on_device(codes):
        _transpose_kernel[grid](codes, out, num_rows, num_columns, TILE=_TILE, num_warps=8)
    return out


def cast_for(rows: torch.Tensor, in_blocks: bool) -> Cast:
    """The cast of `rows`, (M, K), for products with weights that are `in_blocks` or not."""
    return cast_groups(rows) if in_blocks else cast_rows(rows)


def product_of_cast(cast: Cast, rows: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear(rows, weight, bias)`` of the cast of `rows`, (M, K), by `cast_for`, without autograd: (M, N)."""
    if not rows.shape[0]:
        return rows.new_empty(0, weight.shape[0])
    bias = None if bias is None else bias.to(torch.bfloat16)
    right = weight.codes.view(_E4M3), weight.widened.scales
    if weight.in_blocks:
        return block_product(cast, right, bias)[: rows.shape[0]].to(rows.dtype)
    return scaled_product(cast, right, bias, fast=True).to(rows.dtype)


@operator("liger_trainer::fp8_stored_linear")
def _stored_linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    rows, weight = x.reshape(-1, x.shape[-1]), Fp8Weight(codes, scales)
    cast = cast_for(rows, weight.in_blocks)
    return product_of_cast(cast, rows, weight, bias).view(*x.shape[:-1], codes.shape[0])


@_stored_linear.register_fake
def _(x, codes, scales, bias):
    return x.new_empty(*x.shape[:-1], codes.shape[0])


@operator("liger_trainer::fp8_stored_input_gradient")
def _input_gradient(dy: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    rows = dy.reshape(-1, dy.shape[-1])
    if not rows.shape[0]:
        return dy.new_empty(*dy.shape[:-1], codes.shape[1])
    weight = Fp8Weight(codes, scales).widened
    turned, scales = transposed_codes(weight).view(_E4M3), weight.scales
    if weight.in_blocks:
        dx = block_product(cast_groups(rows), (turned, scales.t()))[: rows.shape[0]]
    else:
        rest = scales.new_full((codes.shape[1], 1), 1 / E4M3_MAX)
        dx = scaled_product(cast_scaled_rows(rows, scales * E4M3_MAX), (turned, rest), None, fast=False)
    return dx.to(dy.dtype).view(*dy.shape[:-1], codes.shape[1])


@_input_gradient.register_fake
def _(dy, codes, scales):
    return dy.new_empty(*dy.shape[:-1], codes.shape[1])


refuse_second_derivative(_input_gradient, "fp8_stored_linear")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    # Part of the model, so not saved as activations are: they would be offloaded, and recomputed for.
    _, ctx.codes, ctx.scales, bias = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    need_x, _, _, need_bias = ctx.needs_input_grad
    dx = _input_gradient(dy, ctx.codes, ctx.scales) if need_x else None
    dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=ctx.bias_dtype) if need_bias else None
    return dx, None, None, dbias


_stored_linear.register_autograd(_backward, setup_context=_setup_context)


def product(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear(x, weight, bias)`` of (..., K), in the dtype of `x`: (..., N)."""
    return _stored_linear(x, weight.codes, weight.scales, bias)


def input_gradient(dy: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """``dy @ weight`` of (..., N), in the dtype of `dy`: (..., K)."""
    return _input_gradient(dy, weight.codes, weight.scales)


def fp8_stored_linear(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``linear(x, weight, bias)`` with products in fp8, for a frozen weight in fp8.

    Args:
        x: (..., K), of any floating dtype; under autocast it is cast as for a linear layer.
        weight: (N, K), on a device for which `has_fp8` is True, and `obstacle_to_blocks` empty if it is in blocks.
        bias: (N,), or None.

    Returns:
        (..., N), in the dtype of `x`; computed in bf16. A row that is not finite gives a row that is not finite.

    Raises:
        RuntimeError: In a backward of the backward.
    """
    return product(as_autocast(x), weight, bias)


def fp8_stored_linear_reference(x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`fp8_stored_linear` in plain torch, with x and its gradient in their own dtype: W is rounded to fp8 alone."""
    return F.linear(x, dequantize(weight, x.dtype), bias)
