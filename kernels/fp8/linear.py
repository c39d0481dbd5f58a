"""A linear layer that multiplies in fp8, in one of the modes of `modes.py`.

`product`, `input_gradient` and `weight_gradient` compute its three products::

                     y = X @ W^T + b              dx = dY @ W                  dW = dY^T @ X
    rowwise          X by token, W by output      dY by token, W by input      dY by output, X by input
    rowwise_gw_hp    X by token, W by output      dY by token, W with one      in bf16
    tensorwise       X with one, W with one       dY with one, W with one      dY with one, X with one

    y = (X8 @ W8^T) * scales_x * scales_w + b     the scales of the rows of the result and of its columns
    db = sum dY

A scale can be taken out of a sum if it is the same for all summands, so an operand has one for each of its rows or
columns that is not summed over, or one for all. The output is summed with Hopper's fast accumulation, which keeps some
14 bits of a partial sum (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3.2); the gradients are summed in
fp32.

Operands are cast where they are used. For weights that is 3 % of a step of 16,384 tokens, and no memory. Saved for the
backward: X and W in bf16, as by a linear layer. The recomputation of a checkpointed layer repeats its last product,
unless that is a gated MLP's (`kernels/mlp/gated_down.py`).

On a CPU the codes are multiplied in fp32: the products are exact, as on a GPU, and the sum is rounded as in fp32.

Shapes: M tokens, K inputs, N outputs: X (M, K), W (N, K), y (M, N).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative
from liger_trainer.kernels.fp8.modes import Fp8Mode, Scaling, products_of
from liger_trainer.kernels.fp8.row_cast import (
    E4M3,
    MULTIPLE,
    cast_columns,
    cast_rows,
    cast_transposed,
    cast_whole,
    largest_magnitude,
)
from liger_trainer.kernels.fp8.shared_cast import Cast, cast_input, may_share
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast, is_dtensor


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Whether matmuls in fp8 with a scale for each row run on `device`: Hopper or newer; emulated on a CPU."""
    if device.type == "cpu":
        return True
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def takes_fp8(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the product of `x`, (..., K), and `weight`, (N, K), runs in fp8.

    Both are in bf16, at least under autocast; N and K are multiples of 16; and there is at least one row.
    """
    dtypes = {x.dtype, weight.dtype}
    if torch.is_autocast_enabled(x.device.type) and torch.float64 not in dtypes:
        dtypes = {torch.get_autocast_dtype(x.device.type)}
    sizes = x.numel() > 0 and weight.shape[0] % MULTIPLE == 0 and weight.shape[1] % MULTIPLE == 0
    bf16 = dtypes == {torch.bfloat16}
    return bf16 and sizes and has_fp8(x.device) and not (is_dtensor(x) or is_dtensor(weight))


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mode: str, shares: bool) -> torch.Tensor:
    """``linear(x, weight, bias)`` in fp8, without autograd: (..., K) and (N, K) in bf16 to (..., N).

    `shares` lets it share the cast of x with other layers, where each row of x has a scale.
    """
    of_x, _ = products_of(mode).output
    if shares and of_x is Scaling.ROWS:
        # A layer that narrows, such as a down projection, is alone with its input: nobody else needs the cast.
        cast = cast_input(x, keep=weight.shape[0] >= weight.shape[1])
    else:
        cast = _cast(x.reshape(-1, x.shape[-1]), of_x)
    return product_of_cast(cast, weight, bias, mode).view(*x.shape[:-1], weight.shape[0])


def product_of_cast(cast: Cast, weight: torch.Tensor, bias: torch.Tensor | None, mode: str) -> torch.Tensor:
    """``linear(x, weight, bias)`` in fp8, without autograd, of the cast of x, (M, K), and (N, K) in bf16: (M, N)."""
    products = products_of(mode)
    return scaled_product(cast, _cast(weight, products.output[1]), bias, fast=True, one_scale=products.one_scale)


@operator("liger_trainer::fp8_input_gradient")
def input_gradient(dy: torch.Tensor, weight: torch.Tensor, mode: str, largest: torch.Tensor | None) -> torch.Tensor:
    """``dy @ weight`` in fp8, for rows of a gradient, (M, N), and a weight (N, K), both in bf16: (M, K).

    `largest` is `largest_of_gradient` of `dy`.
    """
    products = products_of(mode)
    of_dy, of_weight = products.input_gradient
    cast = _cast(dy, of_dy, getattr(torch, products.gradient_dtype), largest)
    return scaled_product(cast, _cast_transposed(weight, of_weight), None, fast=False, one_scale=products.one_scale)


@input_gradient.register_fake
def _(dy, weight, mode, largest):
    return dy.new_empty(dy.shape[0], weight.shape[1])


@operator("liger_trainer::fp8_weight_gradient")
def weight_gradient(dy: torch.Tensor, x: torch.Tensor, mode: str, largest: torch.Tensor | None) -> torch.Tensor:
    """``dy.T @ x``, in fp8 unless `mode` has it in bf16, for rows (M, N) and (M, K), both in bf16: (N, K).

    `largest` is `largest_of_gradient` of `dy`.
    """
    products = products_of(mode)
    if products.weight_gradient is None:
        return dy.mT @ x
    of_dy, of_x = products.weight_gradient
    cast = _cast_transposed(dy, of_dy, getattr(torch, products.gradient_dtype), largest)
    return scaled_product(cast, _cast_transposed(x, of_x), None, fast=False, one_scale=products.one_scale)


@weight_gradient.register_fake
def _(dy, x, mode, largest):
    return dy.new_empty(dy.shape[1], x.shape[1])


refuse_second_derivative(input_gradient, "fp8_linear")
refuse_second_derivative(weight_gradient, "fp8_linear")


def largest_of_gradient(dy: torch.Tensor, mode: str) -> torch.Tensor | None:
    """The magnitude by which both products of a gradient scale it; None if its rows have scales of their own."""
    return largest_magnitude(dy) if products_of(mode).input_gradient[0] is Scaling.ONE else None


def _cast(x: torch.Tensor, scaling: Scaling, dtype: torch.dtype = E4M3, largest: torch.Tensor | None = None) -> Cast:
    return cast_rows(x) if scaling is Scaling.ROWS else cast_whole(x, dtype, largest)


def _cast_transposed(
    x: torch.Tensor, scaling: Scaling, dtype: torch.dtype = E4M3, largest: torch.Tensor | None = None
) -> Cast:
    return cast_columns(x) if scaling is Scaling.ROWS else cast_transposed(x, dtype, largest)


def scaled_product(
    left: Cast, right: Cast, bias: torch.Tensor | None, fast: bool, one_scale: bool = False
) -> torch.Tensor:
    """``a @ b.T + bias`` in bf16 of the casts of a, (M, K), and b, (N, K).

    `one_scale` says that all scales of an operand are the same.
    """
    (a, a_scales), (b, b_scales) = left, right
    if a.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            y = (a.float() @ b.float().t()) * a_scales * b_scales.t()
        return (y if bias is None else y + bias).to(torch.bfloat16)
    scaling = F.ScalingType.RowWise
    if one_scale:
        scaling, a_scales, b_scales = F.ScalingType.TensorWise, a_scales[:1], b_scales[:1]
    return F.scaled_mm(
        a, b.t(), a_scales, scaling, b_scales.t(), scaling, bias=bias, output_dtype=torch.bfloat16, use_fast_accum=fast
    )


@operator("liger_trainer::fp8_linear")
def fp8_linear_operator(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mode: str, shares: bool
) -> torch.Tensor:
    """`product`, with its gradients. Call `fp8_linear`."""
    return product(x, weight, bias, mode, shares)


@fp8_linear_operator.register_fake
def _(x, weight, bias, mode, shares):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _, ctx.mode, _ = inputs
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    x, weight = ctx.saved_tensors
    rows, dx, dweight = dy.reshape(-1, dy.shape[-1]), None, None
    largest = largest_of_gradient(rows, ctx.mode)
    if need_x:
        dx = input_gradient(rows, weight, ctx.mode, largest).view(*dy.shape[:-1], weight.shape[1])
    if need_weight:
        dweight = weight_gradient(rows, x.reshape(-1, x.shape[-1]), ctx.mode, largest)
    return input_gradients(ctx, dx, dweight, rows.sum(0) if need_bias else None)


fp8_linear_operator.register_autograd(_backward, setup_context=_setup_context)


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, mode: Fp8Mode = "rowwise_gw_hp"
) -> torch.Tensor:
    """``linear(x, weight, bias)`` whose products are in fp8.

    Args:
        x: (..., K), in bf16; under autocast all inputs are cast as for a linear layer.
        weight: (N, K), in bf16.
        bias: (N,), or None.
        mode: Which products are in fp8, and how their operands are scaled.

    Returns:
        (..., N), in bf16. Where `takes_fp8` is False, such as on a GPU before Hopper or if N or K is no multiple of
        16, the result of a linear layer. A row that is not finite gives a row that is not finite; with
        ``"tensorwise"``, no row is finite then.

    Raises:
        ValueError: If there is no such `mode`.
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    products_of(mode)
    if not takes_fp8(x, weight):
        return F.linear(x, weight, bias)
    x, weight, bias = as_autocast(x), as_autocast(weight), as_autocast(bias)
    return fp8_linear_operator(x, weight, bias, mode, may_share(x))
