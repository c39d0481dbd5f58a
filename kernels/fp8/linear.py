"""A linear layer that multiplies in fp8, forward and for the gradient of its input: ``rowwise_gw_hp``.

::

    y  = (X8 @ W8^T) * scales_x * scales_w + b      X8 by token, W8 by output feature         fast accumulation
    dx = (dY8 @ W8) * scales_dy * scale_w           dY8 by token, W8 with one scale           fp32 accumulation
    dW = dY^T @ X                                   in bf16                                   db = sum dY

These are the operands of torchao's recipe of this name. The contraction of dx runs over output features, so their
scales could not be taken out of the sum: there W has one scale. Hopper's fast accumulation keeps some 14 bits of a
partial sum (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3.2), which gradients do not get.

Weights are cast where they are used, 3 bytes an element: a hundredth of a step, and no memory. Saved for the backward:
X and W in bf16, as by a linear layer. Two operators, as in `kernels/mlp/gated_down.py`, so that a checkpointed layer
does not repeat the last product.

On a CPU the codes are multiplied in fp32: the products are exact, as on a GPU, and the sum is rounded as in fp32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.autocast import as_autocast
from liger_trainer.kernels.autograd import input_gradients, pass_to_placeholder, refuse_second_derivative
from liger_trainer.kernels.fp8.row_cast import cast_rows, cast_transposed
from liger_trainer.kernels.runtime import is_dtensor

MULTIPLE = 16
"""Of which both sizes of a weight must be multiples, for the matmuls."""

_ROWWISE = F.ScalingType.RowWise


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


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear(x, weight, bias)`` in fp8, without autograd: (..., K) and (N, K) in bf16 to (..., N)."""
    codes, scales = cast_rows(x.reshape(-1, x.shape[-1]))
    weight_codes, weight_scales = cast_rows(weight)
    y = scaled_product(codes, weight_codes, scales, weight_scales, bias, fast=True)
    return y.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("liger_trainer::fp8_input_gradient", mutates_args=())
def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``dy @ weight`` in fp8, for rows of a gradient, (M, N), and a weight (N, K), both in bf16: (M, K)."""
    codes, scales = cast_rows(dy)
    weight_codes, scale = cast_transposed(weight.contiguous())
    return scaled_product(codes, weight_codes, scales, scale.expand(weight.shape[1], 1), None, fast=False)


@input_gradient.register_fake
def _(dy, weight):
    return dy.new_empty(dy.shape[0], weight.shape[1])


refuse_second_derivative(input_gradient, "fp8_linear")


def scaled_product(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    bias: torch.Tensor | None,
    fast: bool,
) -> torch.Tensor:
    """``a @ b.T`` of codes, (M, K) and (N, K), times the scales of their rows, (M, 1) and (N, 1), in bf16."""
    if a.device.type == "cpu":
        with torch.autocast("cpu", enabled=False):
            y = (a.float() @ b.float().t()) * a_scales * b_scales.t()
        return (y if bias is None else y + bias).to(torch.bfloat16)
    return F.scaled_mm(
        a,
        b.t(),
        a_scales,
        _ROWWISE,
        b_scales.t().contiguous(),
        _ROWWISE,
        bias=bias,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _save(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A placeholder for y that turns its gradient into those of the operands. Call `fp8_linear`."""
    return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[0])


fp8_linear_save = torch.library.custom_op("liger_trainer::fp8_linear_save", _save, mutates_args=())
fp8_linear_save.register_fake(_save)


@torch.library.custom_op("liger_trainer::fp8_linear", mutates_args=())
def fp8_linear_product(
    placeholder: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product, whose gradient goes to `placeholder`."""
    return product(x, weight, bias)


@fp8_linear_product.register_fake
def _(placeholder, x, weight, bias):
    return x.new_empty(placeholder.shape)


pass_to_placeholder(fp8_linear_product)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)


def _backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return input_gradients(ctx)
    need_x, need_weight, need_bias = ctx.needs_input_grad
    x, weight = ctx.saved_tensors
    rows = dy.reshape(-1, dy.shape[-1])
    dx = input_gradient(rows, weight).view(*dy.shape[:-1], weight.shape[1]) if need_x else None
    dweight = rows.mT @ x.reshape(-1, x.shape[-1]) if need_weight else None
    return dx, dweight, rows.sum(0) if need_bias else None


fp8_linear_save.register_autograd(_backward, setup_context=_setup_context)


def fp8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``linear(x, weight, bias)`` whose products are in fp8 (e4m3), but for the gradient of the weight.

    Args:
        x: (..., K), in bf16; under autocast all inputs are cast as for a linear layer.
        weight: (N, K), in bf16.
        bias: (N,), or None.

    Returns:
        (..., N), in bf16. Where `takes_fp8` is False, such as on a GPU before Hopper or if N or K is no multiple of
        16, the result of a linear layer. A row that is not finite gives a row that is not finite.

    Raises:
        RuntimeError: In the backward, if it runs with ``create_graph=True``.
    """
    if not takes_fp8(x, weight):
        return F.linear(x, weight, bias)
    x, weight, bias = as_autocast(x), as_autocast(weight), as_autocast(bias)
    return fp8_linear_product(fp8_linear_save(x, weight, bias), x, weight, bias)
