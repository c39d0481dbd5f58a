"""RMSNorm over the last dimension, in the roundings of the model families that use it.

Formula (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467), for one row of `x` with hidden size H:

    rstd = 1 / sqrt(mean(x^2) + eps)        x_hat = x * rstd        y = x_hat * (offset + weight)

and, with g = dy * (offset + weight),

    dx = rstd * (g - x_hat * mean(g * x_hat))        dweight = sum over rows of dy * x_hat

Forward reads x and writes y (4 bytes a number in bf16); backward reads x and dy and writes dx (6 bytes). Saved for
backward: x, weight and rstd (fp32, one a row). The weight gradient is summed in fp32 in the registers of a persistent
grid, and a second small kernel adds up what each program found: no atomics, the same bits in every run.

The kernels can also add a residual before the norm; `fused_add_rms_norm` launches them so.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.norms.launch import (
    check_arguments,
    empty_in_order,
    empty_row_values,
    memory_order,
    runs_on_triton,
)
from liger_trainer.kernels.norms.rms_norm_kernels import (
    check_casting,
    empty_gradients,
    launch_backward,
    launch_forward,
    output_dtype,
)


@torch.library.custom_op("liger_trainer::rms_norm", mutates_args=())
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor]:
    y, _, rstd = launch_forward(x, None, weight, eps, offset, casting)
    return y, rstd


@_rms_norm.register_fake
def _(x, weight, eps, offset, casting):
    order = memory_order(x)
    return empty_in_order(x, order, output_dtype(x, weight, casting)), empty_row_values(x, order)


@torch.library.custom_op("liger_trainer::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    offset: float,
    casting: str,
    needs_dx: bool,
    needs_dweight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return launch_backward(dy, None, x, weight, rstd, offset, casting, needs_dx, needs_dweight)


@_rms_norm_backward.register_fake
def _(dy, x, weight, rstd, offset, casting, needs_dx, needs_dweight):
    return empty_gradients(x, weight, needs_dx, needs_dweight)


refuse_second_derivative(_rms_norm_backward, "rms_norm")


def _setup_context(ctx, inputs, output):
    x, weight, _, ctx.offset, ctx.casting = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx, dy, _):
    needs_dx, needs_dweight = ctx.needs_input_grad[:2]
    if dy is None:
        return (None,) * 5
    x, weight, rstd = ctx.saved_tensors
    dx, dweight = _rms_norm_backward(dy, x, weight, rstd, ctx.offset, ctx.casting, needs_dx, needs_dweight)
    return dx if needs_dx else None, dweight if needs_dweight else None, None, None, None


_rms_norm.register_autograd(_backward, setup_context=_setup_context)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """RMSNorm over the last dimension: `x / sqrt(mean(x^2) + eps) * (offset + weight)`.

    Statistics are fp32 except with ``casting="none"``; gradients are computed in fp32 with one rounding in every mode.
    The result has the memory layout of `x` (permuted leading dimensions stay permuted, gaps are closed).

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype.
        weight: Weight of shape (hidden_size,), of the dtype of `x` or another one, such as fp32 under autocast. None
            for a norm without weight; `offset` has then no effect.
        eps: Added to the mean square.
        offset: Added to the weight; 1.0 for Gemma.
        casting: Where the result is rounded to the dtype of `x`.

            - ``"llama"`` (default): the normalised row is rounded, then multiplied by the weight. The result has the
              promoted dtype of `x` and `weight`.
            - ``"gemma"``: everything including `offset + weight` is fp32, the product is rounded.
            - ``"olmo2"``: the normalised row is multiplied by the weight in fp32, the product is rounded (OLMo2,
              GPT-OSS, `torch.nn.RMSNorm`). As ``"gemma"``, except that a non-zero `offset` is added in the dtype of
              the weight.
            - ``"none"``: no casts; each step (square, mean, rsqrt, product) rounds to the dtype of `x`, as torch does
              on tensors of that dtype. The result has the promoted dtype of `x` and `weight`.

    Returns:
        Tensor of the shape of `x`; its dtype is that of `x` but for the promotion above.

    Raises:
        ValueError: If `weight` does not fit `x` in shape or device, a dtype is not floating point, `x` has no last
            dimension of at least 1, or `casting` is unknown.
    """
    check_casting("rms_norm", casting)
    check_arguments("rms_norm", x, weight=weight)
    if not runs_on_triton(x, weight):
        return rms_norm_reference(x, weight, eps, offset, casting)
    return _rms_norm(x, weight, eps, offset, casting)[0]


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """`rms_norm` in plain torch, with torch's own autograd; float64 inputs are computed in float64."""
    compute = x if casting == "none" else x.to(torch.promote_types(x.dtype, torch.float32))
    x_hat = compute * torch.rsqrt(compute.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return x_hat.to(x.dtype)
    if casting == "gemma":
        return (x_hat * (offset + weight.to(compute.dtype))).to(x.dtype)
    scale = weight + offset if offset else weight
    if casting == "olmo2":
        return (scale * x_hat).to(x.dtype)
    return scale * x_hat.to(x.dtype)
