"""Log-probabilities whose negated sum has a gradient that the host knows to be a single number.

Autograd expands the gradient of a sum to the shape of the summand, so its strides show that it is one number. But the
last position is dropped, and TRL negates the log-probabilities before it sums them; torch's gradients of both
operations write the number to every position. Then only the values show it, and reading them makes the host wait for
the device. Here the two operations leave the gradient expanded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.head.deferred_logits import unwrapped
from liger_trainer.kernels.autograd import one_number

_NEGATIONS = (torch.neg, torch.negative, torch.Tensor.neg, torch.Tensor.negative)
_CLONES = (torch.clone, torch.Tensor.clone)  # DistributedDataParallel clones the outputs of a model


class SummedLogProbs(torch.Tensor):
    """Log-probabilities `(B, S)`: a plain tensor, except that the gradient of their negation stays expanded."""

    @classmethod
    def of(cls, log_probs: torch.Tensor, length: int) -> torch.Tensor:
        """The first `length` positions of `log_probs` `(B, S)`; the other positions must have no label."""
        return _SignedPart.apply(log_probs, 1.0, length).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with unwrapped():
            if func in _NEGATIONS and not kwargs:
                return _SignedPart.apply(args[0], -1.0, args[0].shape[-1])
            result = func(*args, **(kwargs or {}))
            return result.as_subclass(cls) if func in _CLONES else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as a plain tensor, since `torch.load` refuses classes that it does not know.
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class _SignedPart(torch.autograd.Function):
    """``sign * tensor[:, :length]``. An expanded gradient stays expanded; the dropped positions have no label."""

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
