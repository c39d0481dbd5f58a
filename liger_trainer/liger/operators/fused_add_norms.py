"""Residual addition and RMSNorm or LayerNorm in one pass, as between two blocks of a pre-norm transformer.

    new_residual = x + residual, rounded to their dtype         y = norm(new_residual)

Both results have gradients, and `x` and `residual` receive the same one:

    dx = dresidual = norm_backward(dy) + dnew_residual

In bf16, forward reads 4 and writes 4 bytes per element, backward reads 6 and writes 2; an addition and a norm apart
move 10 and 8, and torch's own RMSNorm several times that. Saved for backward: new_residual, the parameters, and rstd,
for LayerNorm also mean (fp32, one per row). The kernels are those of `rms_norm` and `layer_norm`.

Shapes: x, residual and y (..., H); weight and bias (H,); mean and rstd, one number a row.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.norms import layer_norm, rms_norm
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import autocast_dtype
from liger_trainer.kernels.runtime import check_like, check_norm_arguments, reference_of


def _differentiate(forward: Any, backward: Any, function: str, parameters: int, options: slice) -> None:
    """Gives an addition and norm its derivative; the parameters follow `residual`, and the backward takes `options`."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.options = inputs[options]
        _, new_residual, *statistics = output
        ctx.save_for_backward(new_residual, *inputs[2 : 2 + parameters], *statistics)

    def gradients(ctx: Any, dy: torch.Tensor | None, new_residual_grad: torch.Tensor | None, *_: None) -> Any:
        needs_x, needs_residual, *needs_parameters = ctx.needs_input_grad[: 2 + parameters]
        found: tuple[Any, ...] = (new_residual_grad,)
        if dy is not None:  # else only the sum was used
            needed = [needs_x or needs_residual, *needs_parameters]
            found = backward(dy, new_residual_grad, *ctx.saved_tensors, *ctx.options, needed)
        # x and residual may share one gradient: autograd copies before it accumulates into a tensor that others hold.
        return input_gradients(ctx, *where_needed(ctx.needs_input_grad, found[0], *found))

    forward.register_autograd(gradients, setup_context=setup_context)
    refuse_second_derivative(backward, function)


@operator("liger_trainer::fused_add_rms_norm")
def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, new_residual, rstd = rms_norm.launch_forward(x, residual, weight, eps, offset, casting)
    assert new_residual is not None
    return y, new_residual, rstd


@operator("liger_trainer::fused_add_rms_norm_backward")
def _fused_add_rms_norm_backward(
    dy: torch.Tensor,
    new_residual_grad: torch.Tensor | None,
    new_residual: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    casting: str,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    return rms_norm.launch_backward(dy, new_residual_grad, new_residual, weight, rstd, offset, casting, needed)


_differentiate(_fused_add_rms_norm, _fused_add_rms_norm_backward, "fused_add_rms_norm", 1, slice(4, None))


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`new_residual = x + residual` and `rms_norm(new_residual, weight, eps, offset, casting)` in one pass.

    `x` is the output of the previous block, `residual` the residual stream, of the shape, dtype and device of `x`. The
    other arguments are those of `rms_norm`.

    Returns:
        `(y, new_residual)`, both of the shape of `x`: the normalised sum, in the dtype that `rms_norm` gives, and the
        sum, rounded to the dtype of `x`.

    Raises:
        ValueError: If `residual` differs from `x` in shape, dtype or device, and as `rms_norm`.
    """
    if casting not in rms_norm.CASTINGS:
        raise rms_norm.unknown_casting("fused_add_rms_norm", casting)
    on_triton = check_norm_arguments("fused_add_rms_norm", x, weight=weight)
    check_like("fused_add_rms_norm", x, ("shape", "dtype", "device"), residual=residual)
    if not on_triton:
        new_residual = x + residual
        return rms_norm.rms_norm_reference(new_residual, weight, eps, offset, casting), new_residual
    y, new_residual, _ = _fused_add_rms_norm(x, residual, weight, eps, offset, casting)
    return y, new_residual


@operator("liger_trainer::fused_add_layer_norm")
def _fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y, new_residual, mean, rstd = layer_norm.launch_forward(x, residual, weight, bias, eps, dtype)
    assert new_residual is not None
    return y, new_residual, mean, rstd


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
    return layer_norm.launch_backward(dy, new_residual_grad, new_residual, weight, bias, mean, rstd, needed)


_differentiate(_fused_add_layer_norm, _fused_add_layer_norm_backward, "fused_add_layer_norm", 2, slice(0))


def fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_add_rms_norm` with `layer_norm(new_residual, weight, bias, eps)` in place of the RMSNorm.

    Raises:
        ValueError: If `residual` differs from `x` in shape, dtype or device, and as `layer_norm`.
    """
    on_triton = check_norm_arguments("fused_add_layer_norm", x, weight=weight, bias=bias)
    check_like("fused_add_layer_norm", x, ("shape", "dtype", "device"), residual=residual)
    if not on_triton:
        new_residual = x + residual
        return layer_norm.layer_norm_reference(new_residual, weight, bias, eps), new_residual
    y, new_residual, _, _ = _fused_add_layer_norm(x, residual, weight, bias, eps, autocast_dtype(x))
    return y, new_residual


fused_add_rms_norm_reference = reference_of(fused_add_rms_norm, "check_norm_arguments")
fused_add_layer_norm_reference = reference_of(fused_add_layer_norm, "check_norm_arguments")
