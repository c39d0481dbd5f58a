"""The operators under softmax and sparsemax of rows, with or without a causal mask.

With x a row, dy the gradient of its result y, and [.] 1 where its condition holds and 0 elsewhere:

    softmax:    y = exp(x - max x) / sum exp(x - max x)          dx = y * (dy - sum(dy * y))
    sparsemax:  y = max(x - tau, 0), tau such that sum(y) = 1    dx = s * (dy - sum(dy * s) / sum(s)),  s = [y > 0]

The usual sparsemax sorts the row to find tau. Here tau is the root of f(tau) = sum(max(x - tau, 0)) - 1, convex and
decreasing, by Newton's method from the left: tau += f(tau) / |{x > tau}|. Such steps never pass the root, so the
support {x > tau} only shrinks, and once it stays the same tau is exact: at most as many steps as numbers, in practice
two to six, with the row in registers. A good start saves steps: max x - 1 is never beyond the root, nor is the root of
a part of the row, and the largest number of each lane is a part that holds most of the support.

With the causal mask, rows belong to square matrices and row i of each ends at column i: what lies beyond is not read,
counts as -inf, and is written as 0.

Bytes moved for (N, V) numbers of b bytes: 2*N*V*b forward, 3*N*V*b backward, with the mask 1.5 and 2. Saved for
backward: y. A y of half precision is rounded, and dx then differs from that of attention weights which are rounded
behind an fp32 softmax; `causal_softmax` of half precision saves x and an fp32 log-sum-exp a row instead, from which the
backward takes y unrounded, for as many bytes moved. Rows too long for registers are read tile by tile, again and again,
mostly from L2: twice for softmax, twice and once a step for sparsemax.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_second_derivative
from liger_trainer.kernels.parity.row_softmax_launch import launch_backward, launch_forward


@torch.library.custom_op("liger_trainer::row_softmax", mutates_args=())
def row_softmax(x: torch.Tensor, sparse: bool, causal: bool) -> torch.Tensor:
    """Softmax or sparsemax over the last dimension, contiguous; call the functions, which check their inputs."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        launch_forward(x, y, sparse, causal)
    return y


@row_softmax.register_fake
def _(x: torch.Tensor, sparse: bool, causal: bool) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("liger_trainer::row_softmax_backward", mutates_args=())
def _row_softmax_backward(dy: torch.Tensor, y: torch.Tensor, sparse: bool, causal: bool) -> torch.Tensor:
    dx = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if dx.numel():
        launch_backward(dy, y, dx, sparse, causal)
    return dx


@_row_softmax_backward.register_fake
def _(dy: torch.Tensor, y: torch.Tensor, sparse: bool, causal: bool) -> torch.Tensor:
    return torch.empty(y.shape, dtype=y.dtype, device=y.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.sparse, ctx.causal = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output)


def _backward(ctx: Any, dy: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
    if dy is None:
        return None, None, None
    (y,) = ctx.saved_tensors
    return _row_softmax_backward(dy, y, ctx.sparse, ctx.causal), None, None


row_softmax.register_autograd(_backward, setup_context=_setup_context)
refuse_second_derivative(_row_softmax_backward, "softmax and sparsemax")


@torch.library.custom_op("liger_trainer::causal_softmax", mutates_args=())
def _causal_softmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The causal softmax, contiguous, and the fp32 log-sum-exp of each row."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    lse = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if y.numel():
        launch_forward(x, y, sparse=False, causal=True, lse=lse)
    return y, lse


@_causal_softmax.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), x.new_empty(x.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("liger_trainer::causal_softmax_backward", mutates_args=())
def _causal_softmax_backward(dy: torch.Tensor, x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        launch_backward(dy, x, dx, sparse=False, causal=True, lse=lse)
    return dx


@_causal_softmax_backward.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _setup_causal(ctx: Any, inputs: tuple[torch.Tensor], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*inputs, output[1])


def _backward_of_causal(ctx: Any, dy: torch.Tensor | None, _: None) -> torch.Tensor | None:
    return None if dy is None else _causal_softmax_backward(dy, *ctx.saved_tensors)


_causal_softmax.register_autograd(_backward_of_causal, setup_context=_setup_causal)
refuse_second_derivative(_causal_softmax_backward, "softmax and sparsemax")


def causal_softmax(x: torch.Tensor) -> torch.Tensor:
    """Causal softmax of square matrices whose gradient is that of the softmax before it was rounded to half."""
    return row_softmax(x, False, True) if x.dtype == torch.float32 else _causal_softmax(x)[0]
