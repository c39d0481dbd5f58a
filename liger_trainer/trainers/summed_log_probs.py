"""Log-probabilities whose sum has a gradient that is known to be one number without a look at it.

Autograd expands the gradient of a sum to the shape of what was summed, and its strides say so. TRL negates the
log-probabilities before it sums them and takes those of the last position away before that; torch's own gradients of
both write the number out, and then only the values tell that it is one, for which the host waits for the device. The
same two operations keep it expanded here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.head.deferred_logits import unwrapped
from liger_trainer.kernels._autograd import one_number

_NEGATIONS = (torch.neg, torch.negative, torch.Tensor.neg, torch.Tensor.negative)
_CLONES = (torch.clone, torch.Tensor.clone)  # DistributedDataParallel's, of what a model returns


class SummedLogProbs(torch.Tensor):
    """Log-probabilities `(B, S)` like any others, but for the gradient of their negation."""

    @classmethod
    def of(cls, log_probs: torch.Tensor, length: int) -> torch.Tensor:
        """The first `length` positions of `log_probs` `(B, S)`; the others must have no label."""
        return _SignedPart.apply(log_probs, 1.0, length).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwrapped():
            if func in _NEGATIONS and not kwargs:
                return _SignedPart.apply(args[0], -1.0, args[0].shape[-1])
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _CLONES else result


class _SignedPart(torch.autograd.Function):
    """``sign * tensor[:, :length]``. Of a gradient that is one number, every position gets its part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sign: float, length: int) -> torch.Tensor:
        ctx.shape, ctx.sign = tensor.shape, sign
        return sign * tensor[:, :length]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        number = one_number(grad)
        if number is not None:
            return (ctx.sign * number).expand(ctx.shape), None, None
        return F.pad(ctx.sign * grad, (0, ctx.shape[1] - grad.shape[1])), None, None
