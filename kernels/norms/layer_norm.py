"""LayerNorm over the last dimension.

Formula (Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450), for one row of `x` with hidden size H:

    x_hat = (x - mean(x)) * rstd        rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)        y = x_hat * weight + bias

and, with g = dy * weight,

    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))
    dweight = sum over rows of dy * x_hat        dbias = sum over rows of dy

Forward reads x and writes y (4 bytes a number in bf16); backward reads x and dy and writes dx (6 bytes). Saved for
backward: x, weight, and mean and rstd (fp32, one a row). The gradients of weight and bias are summed in fp32 in the
registers of a persistent grid and added up by one second small kernel, without atomics.

The kernels can also add a residual before the norm; `fused_add_layer_norm` launches them so.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.norms.launch import (
    autocast_dtype,
    check_arguments,
    empty_in_order,
    empty_row_values,
    memory_order,
    runs_on_triton,
)
from liger_trainer.kernels.norms.layer_norm_kernels import empty_gradients, launch_backward, launch_forward


@torch.library.custom_op("liger_trainer::layer_norm", mutates_args=())
def _layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, _, mean, rstd = launch_forward(x, None, weight, bias, eps, dtype)
    return y, mean, rstd


@_layer_norm.register_fake
def _(x, weight, bias, eps, dtype):
    order = memory_order(x)
    return empty_in_order(x, order, dtype), empty_row_values(x, order), empty_row_values(x, order)


@torch.library.custom_op("liger_trainer::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs_dx: bool,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return launch_backward(dy, None, x, weight, mean, rstd, needs_dx, dweight_dtype, dbias_dtype)


@_layer_norm_backward.register_fake
def _(dy, x, weight, mean, rstd, needs_dx, dweight_dtype, dbias_dtype):
    return empty_gradients(x, needs_dx, dweight_dtype, dbias_dtype)


refuse_second_derivative(_layer_norm_backward, "layer_norm")


def _setup_context(ctx, inputs, output):
    x, weight, bias, _, _ = inputs
    _, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, mean, rstd)


def _backward(ctx, dy, _mean_grad, _rstd_grad):
    if dy is None:
        return (None,) * 5
    needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad[:3]
    x, weight, mean, rstd = ctx.saved_tensors
    dx, dweight, dbias = _layer_norm_backward(
        dy,
        x,
        weight,
        mean,
        rstd,
        needs_dx,
        weight.dtype if needs_dweight else None,
        ctx.bias_dtype if needs_dbias else None,
    )
    return dx if needs_dx else None, dweight if needs_dweight else None, dbias if needs_dbias else None, None, None


_layer_norm.register_autograd(_backward, setup_context=_setup_context)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """LayerNorm over the last dimension, `torch.nn.functional.layer_norm(x, (hidden_size,), weight, bias, eps)`.

    Statistics and gradients are computed in fp32 with one rounding at the end. The result has the memory layout of `x`
    (permuted leading dimensions stay permuted, gaps are closed).

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype.
        weight: Weight of shape (hidden_size,), or None for 1. Its dtype may differ from that of `x`.
        bias: Bias of shape (hidden_size,), or None for 0. Its dtype may differ from that of `x`.
        eps: Added to the variance.

    Returns:
        Tensor of the shape and dtype of `x`; fp32 under autocast on an accelerator, as torch's.

    Raises:
        ValueError: If `weight` or `bias` does not fit `x` in shape or device, a dtype is not floating point, or `x` has
            no last dimension of at least 1.
    """
    check_arguments("layer_norm", x, weight=weight, bias=bias)
    if not runs_on_triton(x, weight, bias):
        return layer_norm_reference(x, weight, bias, eps)
    return _layer_norm(x, weight, bias, eps, autocast_dtype(x))[0]


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`layer_norm` through torch's own operator, in fp32: on a CPU, torch sums half-precision gradients as they are."""
    compute = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(compute) for tensor in (weight, bias))
    return F.layer_norm(x.to(compute), x.shape[-1:], weight, bias, eps).to(autocast_dtype(x))
