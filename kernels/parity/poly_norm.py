"""PolyNorm: a polynomial activation of normalised powers, in place of the gate of a feed-forward block.

Formula (Zhuo et al. 2024, https://arxiv.org/abs/2411.03884), for one row of `x` with hidden size H:

    y = w_0 n_3 + w_1 n_2 + w_2 n_1 + bias        n_p = x^p * r_p        r_p = 1 / sqrt(mean(x^2p) + eps)

and, with S_p the sum over the row of dy * n_p,

    dx = sum over p of w * r_p * p x^(p-1) * (dy - n_p * S_p / H)
    dw = sum over rows of S_p (in the order of the weights)        dbias = sum of dy

Forward reads x and writes y (4 bytes a number in bf16); backward reads x and dy and writes dx (6 bytes). Saved for
backward: x, weight and three fp32 a row. The four sums are taken in fp32 by a persistent grid and added up by a second
small kernel, without atomics.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.norms.launch import (
    as_row_values,
    as_rows,
    check_all_dtensors,
    check_arguments,
    column_sum,
    empty_in_order,
    empty_row_values,
    fit_config,
    forward_config,
    memory_order,
    runs_on_triton,
)
from liger_trainer.kernels.parity.poly_norm_kernels import (
    backward_config,
    poly_norm_backward_kernel,
    poly_norm_forward_kernel,
)
from liger_trainer.kernels.runtime import cdiv, next_power_of_2, num_sms, on_device


@torch.library.custom_op("liger_trainer::poly_norm", mutates_args=())
def _poly_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_size, order = x.shape[-1], memory_order(x)
    y, *rstds = _outputs(x)
    if x.numel() == 0:
        return y, *rstds  # type: ignore[return-value]
    rows = as_rows(x, order)
    config = fit_config(forward_config(hidden_size, x.device), hidden_size, x.element_size(), x.device)
    with on_device(x):
        poly_norm_forward_kernel[(cdiv(rows.shape[0], config.rows),)](
            rows,
            weight.contiguous(),
            bias,
            as_rows(y, order),
            *(as_row_values(rstd, order) for rstd in rstds),
            rows.stride(0),
            rows.shape[0],
            eps,
            H=hidden_size,
            ROWS=config.rows,
            BLOCK_H=next_power_of_2(hidden_size),
            num_warps=config.num_warps,
        )
    return y, *rstds  # type: ignore[return-value]


def _outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """New y, and 1 / root mean square of the third, second and first power of each row."""
    order = memory_order(x)
    rstds = (empty_row_values(x, order), empty_row_values(x, order), empty_row_values(x, order))
    return empty_in_order(x, order, x.dtype), *rstds


@_poly_norm.register_fake
def _(x, weight, bias, eps):
    return _outputs(x)


@torch.library.custom_op("liger_trainer::poly_norm_backward", mutates_args=())
def _poly_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd_3: torch.Tensor,
    rstd_2: torch.Tensor,
    rstd_1: torch.Tensor,
    needs_dx: bool,
    needs_dweight: bool,
    bias_like: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dweight, dbias = _gradients(x, weight, needs_dx, needs_dweight, bias_like)
    if x.numel() == 0:
        return dx, dweight.zero_(), dbias.zero_()
    hidden_size, order = x.shape[-1], memory_order(x)
    rows, dy_rows = as_rows(x, order), as_rows(dy, order)
    bytes_per_column = rows.element_size() + dy_rows.element_size()
    config = fit_config(backward_config(hidden_size, x.device), hidden_size, bytes_per_column, x.device)
    programs = min(cdiv(rows.shape[0], config.rows), num_sms(x.device) * config.programs_per_sm)
    weight_partial = x.new_empty(1, programs, 3, dtype=torch.float32) if needs_dweight else None
    bias_partial = None if bias_like is None else x.new_empty(1, programs, 1, dtype=torch.float32)
    with on_device(x):
        poly_norm_backward_kernel[(programs,)](
            dy_rows,
            rows,
            weight.contiguous(),
            *(as_row_values(rstd, order) for rstd in (rstd_3, rstd_2, rstd_1)),
            as_rows(dx, order) if needs_dx else None,
            weight_partial,
            bias_partial,
            dy_rows.stride(0),
            rows.stride(0),
            rows.shape[0],
            H=hidden_size,
            ROWS=config.rows,
            BLOCK_H=next_power_of_2(hidden_size),
            NUM_STAGES=config.num_stages,
            num_warps=config.num_warps,
        )
        if weight_partial is not None:
            column_sum(weight_partial, dweight)
        if bias_partial is not None:
            column_sum(bias_partial, dbias)
    return dx, dweight, dbias


@_poly_norm_backward.register_fake
def _(dy, x, weight, rstd_3, rstd_2, rstd_1, needs_dx, needs_dweight, bias_like):
    return _gradients(x, weight, needs_dx, needs_dweight, bias_like)


refuse_second_derivative(_poly_norm_backward, "poly_norm")


def _gradients(
    x: torch.Tensor, weight: torch.Tensor, needs_dx: bool, needs_dweight: bool, bias_like: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New gradients of x, weight and bias, empty where not needed."""
    return (
        empty_in_order(x, memory_order(x), x.dtype) if needs_dx else x.new_empty(0),
        weight.new_empty(weight.shape if needs_dweight else 0),
        x.new_empty(0) if bias_like is None else bias_like.new_empty(bias_like.shape),
    )


def _setup_context(ctx, inputs, output):
    x, weight, bias, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _backward(ctx, dy, *_):
    if dy is None:
        return (None,) * 4
    x, weight, bias, *rstds = ctx.saved_tensors
    needs = ctx.needs_input_grad[:3]
    gradients = _poly_norm_backward(dy, x, weight, *rstds, *needs[:2], bias if needs[2] else None)
    return *(gradient if needed else None for gradient, needed in zip(gradients, needs)), None


_poly_norm.register_autograd(_backward, setup_context=_setup_context)


def poly_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """PolyNorm over the last dimension: `w[0] * norm(x^3) + w[1] * norm(x^2) + w[2] * norm(x) + bias`.

    `norm(u) = u / sqrt(mean(u^2) + eps)`. All of it is computed in fp32 and rounded once. The result has the memory
    layout of `x` (permuted leading dimensions stay permuted, gaps are closed).

    Args:
        x: Input of shape (..., hidden_size) and any floating dtype; numbers beyond 2e6 overflow the sixth power.
        weight: The three weights, of the third power first, shape (3,). Its dtype may differ from that of `x`.
        bias: One number, of shape () or (1,), or None (default) for 0.
        eps: Added to each mean square.

    Returns:
        Tensor of the shape and dtype of `x`.

    Raises:
        ValueError: If `weight` is not three and `bias` not one floating point number on the device of `x`, or `x` is
            not of a floating dtype or has no last dimension of at least 1.
    """
    check_arguments("poly_norm", x)
    check_all_dtensors("poly_norm", x, weight=weight, bias=bias)
    for argument, parameter, size in (("weight", weight, 3), ("bias", bias, 1)):
        if parameter is None:
            continue
        fits = parameter.numel() == size and parameter.dim() <= 1
        if not fits or not parameter.is_floating_point() or parameter.device != x.device:
            raise ValueError(
                f"`{argument}` of poly_norm has shape {tuple(parameter.shape)}, dtype {parameter.dtype} and is on "
                f"{parameter.device}; give a floating point tensor of shape ({size},) on {x.device}, where `x` is."
            )
    if not runs_on_triton(x, weight, bias):
        return poly_norm_reference(x, weight, bias, eps)
    return _poly_norm(x, weight, bias, eps)[0]


def poly_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """`poly_norm` in plain torch, with torch's own autograd; float64 inputs are computed in float64."""
    compute = torch.promote_types(x.dtype, torch.float32)
    powers = [x.to(compute) ** power for power in (3, 2, 1)]
    norms = [power * torch.rsqrt(power.pow(2).mean(-1, keepdim=True) + eps) for power in powers]
    y = sum(w * norm for w, norm in zip(weight.to(compute), norms))
    return (y if bias is None else y + bias.to(compute)).to(x.dtype)
