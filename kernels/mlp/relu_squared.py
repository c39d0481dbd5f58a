"""Squared ReLU, the activation of Primer (arXiv 2109.08668), Nemotron and Arcee.

::

    y = max(x, 0)^2        dx = 2 max(x, 0) dy

Elements moved per element of x: forward 2 (one read, one written), backward 3 (two read, one written). Saved for
backward: x.

Shapes: any; the kernels see one flat array.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.activation import activation_and_derivative
from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.mlp.gated_activation import launch_config, overwrites_saved
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import (
    cdiv,
    has_elements,
    is_expanded,
    on_device,
    reference_of,
    tl,
    triton,
    use_triton,
)


@triton.jit
def _forward_kernel(x_ptr, y_ptr, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    y, _ = activation_and_derivative(x, "relu_squared")
    tl.store(y_ptr + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(dy_ptr, x_ptr, dx_ptr, numel, BLOCK: tl.constexpr):
    # dx may be x: every element is read before it is written, by the same thread.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    _, derivative = activation_and_derivative(x, "relu_squared")
    tl.store(dx_ptr + offsets, (derivative * dy).to(dx_ptr.dtype.element_ty), mask=mask)


def _launch(kernel: Any, *tensors: torch.Tensor) -> None:
    if not has_elements(tensors[0]):
        return
    numel = tensors[0].numel()
    block, num_warps = launch_config(tensors[0].element_size())
    with on_device(tensors[0]):
        kernel[(cdiv(numel, block),)](*tensors, numel, BLOCK=block, num_warps=num_warps)


@operator("liger_trainer::relu_squared")
def _relu_squared(x: torch.Tensor, inplace_backward: bool) -> torch.Tensor:
    y = x.new_empty(x.shape)
    _launch(_forward_kernel, x.contiguous(), y)
    return y


@operator("liger_trainer::relu_squared_backward")
def _relu_squared_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    dx = x.new_empty(x.shape)
    _launch(_backward_kernel, dy.contiguous(), x.contiguous(), dx)
    return dx


refuse_second_derivative(_relu_squared_backward, "relu_squared")


@operator("liger_trainer::relu_squared_backward_", mutates=("x",))
def _relu_squared_backward_(dy: torch.Tensor, x: torch.Tensor) -> None:
    """Overwrites x with its gradient."""
    dx = x.contiguous()
    _launch(_backward_kernel, dy.contiguous(), dx, dx)
    if dx.data_ptr() != x.data_ptr():
        x.copy_(dx)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.inplace_backward = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    if not overwrites_saved(ctx):
        return _relu_squared_backward(dy, x), None
    dx = x.detach()
    _relu_squared_backward_(dy, dx)
    return dx, None


_relu_squared.register_autograd(_backward, setup_context=_setup_context)


def relu_squared(x: torch.Tensor, *, inplace_backward: bool = False) -> torch.Tensor:
    """``relu(x) ** 2``, one pass forward and one backward.

    Args:
        x: Any shape and strides. float16, bfloat16 or float32 for the kernel; other dtypes run the reference.
        inplace_backward: Lets the backward write the gradient over `x`. Only for an intermediate that nothing else
            reads afterwards. A backward that keeps its graph never overwrites. No effect on the reference.

    Returns:
        A new contiguous tensor shaped as `x`, in its dtype.

    Raises:
        ValueError: If `inplace_backward` is set while `x` is expanded, so that its elements share memory.
    """
    if inplace_backward and is_expanded(x):
        raise ValueError("`inplace_backward=True` writes a gradient over `x`, but it is expanded.")
    if use_triton(x):
        return _relu_squared(x, inplace_backward)
    positive = F.relu(x)
    return positive * positive  # of `square`, autocast would return fp32


relu_squared_reference = reference_of(relu_squared, "use_triton")
