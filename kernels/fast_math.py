"""A logarithm, a root and a quotient of few instructions on NVIDIA GPUs, and the hyperbolic tangent.

On NVIDIA GPUs ``tl.log2`` is a library routine of about 25 instructions with a branch per element, which makes kernels
that take logarithms of whole rows compute-bound. The error of ``lg2.approx`` is at most 2**-22, relative or, near 1,
absolute. On other GPUs ``tl.log2`` is a hardware instruction.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import INTERPRETED, tl, triton


def has_lg2(tensor: torch.Tensor) -> bool:
    """Whether kernels on the device of `tensor` may use PTX; the value for `LG2` of `log2`, and for `FAST`."""
    return tensor.device.type == "cuda" and torch.version.hip is None and not INTERPRETED


@triton.jit
def log2(x, LG2: tl.constexpr):
    """log2 of an fp32 tensor, clamped from below to the smallest normal number; unspecified for NaN."""
    x = tl.maximum(x, 1.1754943508222875e-38)
    if LG2:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505 (a compile-time branch)
        return tl.log2(x)


@triton.jit
def tanh_and_derivative(x):
    """tanh(x) and 1 - tanh(x)^2 of an fp32 tensor, with the relative error of a few roundings."""
    decay = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + decay)
    far = (1.0 - decay) * inverse
    square = x * x
    near = 1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    tanh = tl.where(tl.abs(x) < 0.25, x * near, tl.where(x < 0, -far, far))
    return tanh, 4.0 * decay * inverse * inverse


@triton.jit
def fast_sqrt(x, FAST: tl.constexpr):
    """The root of an fp32 tensor; with `FAST`, PTX: to a relative 2**-22, and 0 below the smallest normal number."""
    if FAST:
        return tl.inline_asm_elementwise(
            "sqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505 (a compile-time branch)
        return tl.sqrt(x)


@triton.jit
def fast_quotient(x, y, FAST: tl.constexpr):
    """The quotient x / y of fp32 tensors with y in 2**-126 ... 2**126; with `FAST`, PTX, to a relative 2**-22."""
    if FAST:
        return x * tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return x / y
