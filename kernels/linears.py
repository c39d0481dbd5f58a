"""Linear layers of one input, whose backward adds up the gradients of the input inside of its products.

    y_i = x @ W_i^T + b_i        dx = sum over i of dy_i @ W_i        dW_i = dy_i^T @ x        db_i = sum of dy_i

Autograd makes each summand of dx in memory of its own, and adds two at a time: a pass over 6 bytes per element in bf16
for each layer but one, and a rounding. Here each layer hands its input on to the next one. Its backward gets the
gradient of all that follow, and its product is added to that in the matmul, in fp32 before the one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.kernels.runtime import as_autocast


class _HandingOn(torch.autograd.Function):
    """``(x @ weight.T + bias, x)``; the gradient of the second result is that of the layers that follow."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias), x.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dx: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dy is None:
            return dx, None, None
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        if not ctx.needs_input_grad[0]:
            dx = None
        elif dx is None:
            dx = (rows @ weight).view(x.shape)
        elif torch.is_grad_enabled():
            dx = torch.addmm(dx.reshape(-1, x.shape[-1]), rows, weight).view(x.shape)
        else:  # nobody else has the gradient of what was handed on
            dx.view(-1, x.shape[-1]).addmm_(rows, weight)
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dweight, rows.sum(0) if ctx.needs_input_grad[2] else None


def linears(x: torch.Tensor, layers: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> tuple[torch.Tensor, ...]:
    """The results of linear layers of one input.

    Args:
        x: The input (..., in_features), of any floating dtype.
        layers: Weight (out_features, in_features) and bias (out_features,), or None, of each layer, of the dtype of
            `x`. Under autocast all are cast as for `torch.nn.functional.linear`.

    Returns:
        The result (..., out_features) of each layer.
    """
    results = []
    handed_on = as_autocast(x)
    for weight, bias in layers:
        result, handed_on = _HandingOn.apply(handed_on, as_autocast(weight), as_autocast(bias))
        results.append(result)
    return tuple(results)
