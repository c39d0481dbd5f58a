"""Log-probabilities over a head whose gradients are computed in the forward, for an expected upstream gradient.

A loss that weighs all tokens alike gives every log-probability the same upstream gradient, one number. The forward is
then that of `linear_cross_entropy`, which computes dX, dW and dbias as well: three matmuls, two for a frozen head. The
backward has two cases:

    one number   it returns these gradients, rescaled if the number is not the expected one (`rescale`)
    any other    it recomputes the logits (`linear_log_probs_backward`): three matmuls more, two for a frozen head

An upstream gradient of the entropies is the second case, and the host knows whether there is one. The gradient of a sum
is the first: autograd expands it, so its strides show that it is one number. For all others the values decide, and
reading them makes the host wait for the device.

Saved for backward: the gradients, and for the second case the inputs and three fp32 numbers a token.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients, one_number
from liger_trainer.kernels.head.head_chunks import Needs, logits_buffer
from liger_trainer.kernels.head.linear_cross_entropy import loss_and_gradients
from liger_trainer.kernels.head.linear_log_probs_backward import recomputed_gradients
from liger_trainer.kernels.head.rescale import expected_gradient, rescaled_gradients
from liger_trainer.kernels.head.row_statistics import RowOptions, Shard, compute_dtype


def log_probs_with_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: RowOptions,
    logits_memory: int,
    entropy: bool,
    predicted: bool,
    needs: Needs,
    expected_grad: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, both differentiable, and predicted ids of `(N, H)` hidden states; each `(N,)`.

    Entropies and ids are empty if not asked for; `expected_grad` is that of `linear_log_probs`.
    """
    one = torch.ones((), dtype=compute_dtype(hidden), device=hidden.device)
    with torch.no_grad():
        expected = expected_gradient(expected_grad, one, hidden.dtype, normalised=False)
        _, d_hidden, d_weight, d_bias, nll, lse, entropies, ids = loss_and_gradients(
            hidden, weight, target, bias, None, one, expected, *options, logits_memory, entropy, predicted, *needs
        )
    log_probs, entropies = _ExpectedGradient.apply(
        hidden, weight, bias, target, options, logits_memory, nll, lse, entropies, expected, d_hidden, d_weight, d_bias
    )
    return log_probs, entropies, ids


class _ExpectedGradient(torch.autograd.Function):
    """Log-probabilities and entropies, already known, as differentiable functions of hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: RowOptions,
        logits_memory: int,
        nll: torch.Tensor,
        lse: torch.Tensor,
        entropy: torch.Tensor,
        expected: torch.Tensor,
        d_hidden: torch.Tensor,
        d_weight: torch.Tensor,
        d_bias: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, target, nll, lse, entropy, expected, d_hidden, d_weight, d_bias)
        ctx.options, ctx.logits_memory = options, logits_memory
        return 0.0 - nll, entropy.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target, nll, lse, entropy, expected, *computed = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[:3])
        gradients: list[torch.Tensor | None] = [None, None, None]
        number = None
        if grad is not None and grad_entropy is None:
            number = one_number(grad)
            if number is None:
                number = number_by_values(grad, target != ctx.options.ignore_index)
        if number is not None:
            wanted = [gradient if need else None for gradient, need in zip(computed, needs)]
            gradients = rescaled_gradients(wanted, -number, expected, "linear_log_probs")
        elif grad is not None or grad_entropy is not None:
            gradients = recomputed_gradients(
                None if grad is None else -grad, grad_entropy,
                hidden, weight, target, bias, nll, lse, entropy, logits_buffer(hidden, weight, 0),
                ctx.options, ctx.logits_memory, Shard(0, weight.shape[0]), needs,
            )  # fmt: skip
        return input_gradients(ctx, *gradients)


def number_by_values(grad: torch.Tensor, valid: torch.Tensor) -> torch.Tensor | None:
    """The value that `grad` has wherever `valid`, 0-d; None if there are several. The host waits for the device.

    It is also None while a CUDA graph is captured, which forbids waiting.
    """
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    low = grad.masked_fill(~valid, float("inf")).amin()
    high = grad.masked_fill(~valid, float("-inf")).amax()
    if not low >= high:  # NaN too
        return None
    return torch.where(low > high, 0.0, high)  # without a valid token low is inf and high is -inf
