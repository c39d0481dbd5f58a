"""Residual addition and LayerNorm in one pass, as between two blocks of a pre-norm transformer.

    new_residual = x + residual, rounded to their dtype         y = layer_norm(new_residual)

Both results have gradients, and `x` and `residual` receive the same one:

    dx = dresidual = layer_norm_backward(dy) + dnew_residual

In bf16, forward reads 4 and writes 4 bytes per element, backward reads 6 and writes 2; an addition and a norm apart
move 10 and 8. Saved for backward: new_residual, weight, bias, and mean and rstd (fp32, one per row). The kernels are
those of `layer_norm`.

Shapes: x, residual and y (..., H); weight and bias (H,); mean and rstd, one number a row.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative, where_needed
from liger_trainer.kernels.norms.layer_norm import (
    launch_backward,
    launch_forward,
    layer_norm_reference,
)
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import (
    autocast_dtype,
    check_arguments,
    check_like,
    empty_gradients,
    empty_in_order,
    empty_row_values,
    memory_order,
    runs_on_triton,
)


@operator("liger_trainer::fused_add_layer_norm")
def _fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y, new_residual, mean, rstd = launch_forward(x, residual, weight, bias, eps, dtype)
    assert new_residual is not None
    return y, new_residual, mean, rstd


@_fused_add_layer_norm.register_fake
def _(x, residual, weight, bias, eps, dtype):
    order = memory_order(x)
    y, new_residual = empty_in_order(x, order, dtype), empty_in_order(x, order, x.dtype)
    return y, new_residual, empty_row_values(x, order), empty_row_values(x, order)


@operator("liger_trainer::fused_add_layer_norm_backward")
def _fused_add_layer_norm_backward(
    dy: torch.Tensor,
    new_residual_grad: torch.Tensor | None,
    new_residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return launch_backward(dy, new_residual_grad, new_residual, weight, bias, mean, rstd, needed)


@_fused_add_layer_norm_backward.register_fake
def _(dy, new_residual_grad, new_residual, weight, bias, mean, rstd, needed):
    return empty_gradients(needed, new_residual, weight, bias)


refuse_second_derivative(_fused_add_layer_norm_backward, "fused_add_layer_norm")


def _setup_context(ctx, inputs, output):
    _, _, weight, bias, _, _ = inputs
    _, new_residual, mean, rstd = output
    ctx.save_for_backward(new_residual, weight, bias, mean, rstd)


def _backward(ctx, dy, new_residual_grad, _mean_grad, _rstd_grad):
    needs_x, needs_residual, needs_dweight, needs_dbias = ctx.needs_input_grad[:4]
    if dy is None:  # only the sum was used
        dx, dweight, dbias = new_residual_grad, None, None
    else:
        needed = [needs_x or needs_residual, needs_dweight, needs_dbias]
        dx, dweight, dbias = _fused_add_layer_norm_backward(dy, new_residual_grad, *ctx.saved_tensors, needed)
    # x and residual may share one gradient: autograd copies before it accumulates into a tensor that others hold.
    return *where_needed(ctx.needs_input_grad, dx, dx, dweight, dbias), None, None


_fused_add_layer_norm.register_autograd(_backward, setup_context=_setup_context)


def fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`new_residual = x + residual` and `layer_norm(new_residual, weight, bias, eps)` in one pass.

    `x` is the output of the previous block, `residual` the residual stream, of the shape, dtype and device of `x`. The
    other arguments are those of `layer_norm`.

    Returns:
        `(y, new_residual)`, both of the shape of `x`: the normalised sum, in the dtype that `layer_norm` gives, and
        the sum, rounded to the dtype of `x`.

    Raises:
        ValueError: If `residual` differs from `x` in shape, dtype or device, and as `layer_norm`.
    """
    check_arguments("fused_add_layer_norm", x, weight=weight, bias=bias)
    check_like("fused_add_layer_norm", x, ("shape", "dtype", "device"), residual=residual)
    if not runs_on_triton(x, weight, bias):
        return fused_add_layer_norm_reference(x, residual, weight, bias, eps)
    y, new_residual, _, _ = _fused_add_layer_norm(x, residual, weight, bias, eps, autocast_dtype(x))
    return y, new_residual


def fused_add_layer_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_add_layer_norm` in plain torch, with torch's own autograd."""
    new_residual = x + residual
    return layer_norm_reference(new_residual, weight, bias, eps), new_residual
