"""Residual addition and RMSNorm in one pass, as between two blocks of a pre-norm transformer.

    new_residual = x + residual, rounded to their dtype         y = rms_norm(new_residual)

Both results have gradients, and `x` and `residual` receive the same one:

    dx = dresidual = rms_norm_backward(dy) + dnew_residual

In bf16, forward reads 4 and writes 4 bytes per element, backward reads 6 and writes 2; an addition and a norm apart
move 10 and 8, and torch's own norm several times that. Saved for backward: new_residual, weight and rstd (fp32, one per
row). The kernels are those of `rms_norm`.

Shapes: x, residual and y (..., H); weight (H,); rstd, one number a row.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative, where_needed
from liger_trainer.kernels.norms.rms_norm import (
    check_casting,
    launch_backward,
    launch_forward,
    output_dtype,
    rms_norm_reference,
)
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.rows import (
    check_arguments,
    check_like,
    empty_gradients,
    empty_in_order,
    empty_row_values,
    memory_order,
    runs_on_triton,
)


@operator("liger_trainer::fused_add_rms_norm")
def _fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, new_residual, rstd = launch_forward(x, residual, weight, eps, offset, casting)
    assert new_residual is not None
    return y, new_residual, rstd


@_fused_add_rms_norm.register_fake
def _(x, residual, weight, eps, offset, casting):
    order = memory_order(x)
    y = empty_in_order(x, order, output_dtype(x, weight, casting))
    return y, empty_in_order(x, order, x.dtype), empty_row_values(x, order)


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
    return launch_backward(dy, new_residual_grad, new_residual, weight, rstd, offset, casting, needed)


@_fused_add_rms_norm_backward.register_fake
def _(dy, new_residual_grad, new_residual, weight, rstd, offset, casting, needed):
    return empty_gradients(needed, new_residual, weight)


refuse_second_derivative(_fused_add_rms_norm_backward, "fused_add_rms_norm")


def _setup_context(ctx, inputs, output):
    _, _, weight, _, ctx.offset, ctx.casting = inputs
    _, new_residual, rstd = output
    ctx.save_for_backward(new_residual, weight, rstd)


def _backward(ctx, dy, new_residual_grad, _):
    needs_x, needs_residual, needs_dweight = ctx.needs_input_grad[:3]
    if dy is None:  # only the sum was used
        dx, dweight = new_residual_grad, None
    else:
        needed = [needs_x or needs_residual, needs_dweight]
        dx, dweight = _fused_add_rms_norm_backward(
            dy, new_residual_grad, *ctx.saved_tensors, ctx.offset, ctx.casting, needed
        )
    # x and residual may share one gradient: autograd copies before it accumulates into a tensor that others hold.
    return *where_needed(ctx.needs_input_grad, dx, dx, dweight), None, None, None


_fused_add_rms_norm.register_autograd(_backward, setup_context=_setup_context)


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
    check_casting("fused_add_rms_norm", casting)
    check_arguments("fused_add_rms_norm", x, weight=weight)
    check_like("fused_add_rms_norm", x, ("shape", "dtype", "device"), residual=residual)
    if not runs_on_triton(x, weight):
        return fused_add_rms_norm_reference(x, residual, weight, eps, offset, casting)
    y, new_residual, _ = _fused_add_rms_norm(x, residual, weight, eps, offset, casting)
    return y, new_residual


def fused_add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_add_rms_norm` in plain torch, with torch's own autograd."""
    new_residual = x + residual
    return rms_norm_reference(new_residual, weight, eps, offset, casting), new_residual
