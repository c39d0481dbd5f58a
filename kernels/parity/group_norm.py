"""GroupNorm: the channels of a sample in groups, each group normalised over its channels and all positions.

Formula (Wu and He 2018, https://arxiv.org/abs/1803.08494), for one group of one sample, L numbers in all, and a channel
c of it:

    x_hat = (x - mean) * rstd        rstd = 1 / sqrt(mean((x - mean)^2) + eps)        y = x_hat * weight_c + bias_c

and, with g = dy * weight_c,

    dx = rstd * (g - mean(g) - x_hat * mean(g * x_hat))
    dweight_c = sum over samples and positions of dy * x_hat        dbias_c = the same of dy

Where a group fits a program (32768 numbers, 16384 in the backward), forward reads x and writes y (4 bytes a number in
bf16) and backward reads x and dy and writes dx (6 bytes). A larger group is spread over several programs and its inputs
are read twice: 6 and 10 bytes, less what the L2 cache still holds. Saved for backward: x, weight, and mean and rstd
(fp32, one a group). No gradient uses atomics.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.norms.launch import autocast_dtype
from liger_trainer.kernels.parity.group_norm_launch import launch_backward, launch_forward
from liger_trainer.kernels.runtime import is_dtensor, use_triton


def _by_position(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` of shape (samples, channels, ...) as contiguous (samples, channels, positions)."""
    return tensor.reshape(*tensor.shape[:2], tensor.shape[2:].numel()).contiguous()


@torch.library.custom_op("liger_trainer::group_norm", mutates_args=())
def _group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    y, mean, rstd = _outputs(x, num_groups, dtype)
    if x.numel():
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        launch_forward(_by_position(x), weight, bias, num_groups, eps, y, mean, rstd)
    return y, mean, rstd


def _outputs(x: torch.Tensor, num_groups: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New y, contiguous, and mean and rstd of shape (samples, groups)."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    mean, rstd = (x.new_empty(x.shape[0], num_groups, dtype=torch.float32) for _ in range(2))
    return y, mean, rstd


@_group_norm.register_fake
def _(x, num_groups, weight, bias, eps, dtype):
    return _outputs(x, num_groups, dtype)


@torch.library.custom_op("liger_trainer::group_norm_backward", mutates_args=())
def _group_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    needs_dx: bool,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradients = _gradients(x, needs_dx, dweight_dtype, dbias_dtype)
    if x.numel() == 0:
        for gradient in gradients:
            gradient.zero_()
        return gradients
    weight = None if weight is None else weight.contiguous()
    dx, dweight, dbias = (gradient if gradient.numel() else None for gradient in gradients)
    launch_backward(_by_position(dy), _by_position(x), weight, mean.contiguous(), rstd.contiguous(), dx, dweight, dbias)
    return gradients


@_group_norm_backward.register_fake
def _(dy, x, weight, mean, rstd, needs_dx, dweight_dtype, dbias_dtype):
    return _gradients(x, needs_dx, dweight_dtype, dbias_dtype)


refuse_second_derivative(_group_norm_backward, "group_norm")


def _gradients(
    x: torch.Tensor, needs_dx: bool, dweight_dtype: torch.dtype | None, dbias_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """New gradients of x, weight and bias, empty where not needed."""
    dweight, dbias = (
        x.new_empty(0 if dtype is None else x.shape[1], dtype=dtype or x.dtype)
        for dtype in (dweight_dtype, dbias_dtype)
    )
    return torch.empty(x.shape if needs_dx else 0, dtype=x.dtype, device=x.device), dweight, dbias


def _setup_context(ctx, inputs, output):
    x, _, weight, bias, _, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, *output[1:])


def _backward(ctx, dy, _mean_grad, _rstd_grad):
    if dy is None:
        return (None,) * 6
    needs_dx, _, needs_dweight, needs_dbias = ctx.needs_input_grad[:4]
    x, weight, mean, rstd = ctx.saved_tensors
    dweight_dtype, dbias_dtype = weight.dtype if needs_dweight else None, ctx.bias_dtype if needs_dbias else None
    dx, dweight, dbias = _group_norm_backward(dy, x, weight, mean, rstd, needs_dx, dweight_dtype, dbias_dtype)
    return (
        dx if needs_dx else None,
        None,
        dweight if needs_dweight else None,
        dbias if needs_dbias else None,
        None,
        None,
    )


_group_norm.register_autograd(_backward, setup_context=_setup_context)


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """GroupNorm, `torch.nn.functional.group_norm(x, num_groups, weight, bias, eps)`.

    Statistics and gradients are computed in fp32 with one rounding at the end. An input that is not contiguous
    (channels last, say) is copied, and the result is contiguous, as torch's is on a GPU.

    Args:
        x: Input of shape (samples, channels, ...) and any floating dtype.
        num_groups: Number of groups, a divisor of the number of channels.
        weight: Weight of shape (channels,), or None for 1. Its dtype may differ from that of `x`.
        bias: Bias of shape (channels,), or None for 0. Its dtype may differ from that of `x`.
        eps: Added to the variance.

    Returns:
        Tensor of the shape and dtype of `x`; fp32 under autocast on an accelerator, as torch's.

    Raises:
        ValueError: If `x` has no channels, `num_groups` does not divide them, `weight` or `bias` does not fit `x` in
            shape or device, or a dtype is not floating point.
    """
    _check(x, num_groups, weight=weight, bias=bias)
    if not all(tensor is None or use_triton(tensor) for tensor in (x, weight, bias)):
        return group_norm_reference(x, num_groups, weight, bias, eps)
    return _group_norm(x, num_groups, weight, bias, eps, autocast_dtype(x))[0]


def _check(x: torch.Tensor, num_groups: int, **parameters: torch.Tensor | None) -> None:
    if not x.is_floating_point() or x.dim() < 2:
        raise ValueError(
            f"`x` of group_norm has shape {tuple(x.shape)} and dtype {x.dtype}; give a floating point tensor of shape "
            f"(samples, channels, ...)."
        )
    for argument, tensor in {"x": x, **parameters}.items():
        if tensor is not None and is_dtensor(tensor):
            raise ValueError(
                f"`{argument}` of group_norm is a DTensor, which torch's own does not split either; give the "
                f"whole tensor, `{argument}.full_tensor()`."
            )
    channels = x.shape[1]
    if num_groups < 1 or channels < 1 or channels % num_groups:
        raise ValueError(
            f"`num_groups` of group_norm is {num_groups}, which does not divide the {channels} channels of `x`, "
            f"whose shape is {tuple(x.shape)}."
        )
    for argument, parameter in parameters.items():
        if parameter is None:
            continue
        if parameter.shape != (channels,) or not parameter.is_floating_point() or parameter.device != x.device:
            raise ValueError(
                f"`{argument}` of group_norm has shape {tuple(parameter.shape)} and dtype {parameter.dtype} and is on "
                f"{parameter.device}; give a floating point tensor of shape ({channels},), one number for each channel "
                f"of `x`, on {x.device}, or None."
            )


def group_norm_reference(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`group_norm` through torch's own operator, in fp32, as `layer_norm_reference`."""
    if x.numel() == 0:  # torch gives a weight the gradient NaN
        return sum((p.sum() * 0 for p in (weight, bias) if p is not None), x).to(autocast_dtype(x))
    if weight is None and bias is not None:  # torch has no backward for that
        weight = torch.ones_like(bias)
    compute = torch.promote_types(x.dtype, torch.float32)
    weight, bias = (None if tensor is None else tensor.to(compute) for tensor in (weight, bias))
    return torch.group_norm(x.to(compute), num_groups, weight, bias, eps).to(autocast_dtype(x))
