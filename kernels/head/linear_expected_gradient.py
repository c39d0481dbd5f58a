"""Log-probabilities over a head whose gradients are computed in the forward, for an expected upstream gradient.

A loss that weighs all tokens alike gives every log-probability the same upstream gradient, one number. The forward is
then that of `linear_cross_entropy`, which computes dX, dW and dbias as it goes: three matmuls, two for a frozen head.
The backward has two cases:

    one number   it hands the gradients over, rescaled if the number is not the expected one (`_rescale`)
    any other    it recomputes the logits (`_linear_row_gradients`): three matmuls more, two for a frozen head

An upstream gradient of the entropies is the second case, and the host knows whether there is one. The gradient of a sum
is the first: autograd expands it, so its strides say that it is one number. For all others the values decide, and
reading the answer makes the host wait for the device.

Saved for the backward are the inputs as well, for the second case.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.autograd import one_number
from liger_trainer.kernels.head.cross_entropy_options import RowOptions, compute_dtype
from liger_trainer.kernels.head.head_chunks import Needs
from liger_trainer.kernels.head.linear_cross_entropy import loss_and_gradients
from liger_trainer.kernels.head.linear_row_gradients import recomputed_gradients
from liger_trainer.kernels.head.linear_rows import allocate_kept
from liger_trainer.kernels.head.rescale import expected_gradient, rescaled_gradients


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
    """Log-probabilities and entropies, differentiable, and predicted ids of `(N, H)` hidden states; each `(N,)`.

    Entropies and ids are empty where they are not asked for; `expected_grad` is that of `linear_log_probs`.
    """
    one = torch.ones((), dtype=compute_dtype(hidden), device=hidden.device)
    with torch.no_grad():
        expected = expected_gradient(expected_grad, one, hidden.dtype, normalised=False)
        _, *made, nll, lse, entropies, ids = loss_and_gradients(
            hidden, weight, target, bias, None, one, expected, *options, logits_memory, entropy, predicted, *needs
        )
    saved = (nll, lse, entropies, expected, *made)
    return (*_ExpectedGradient.apply(hidden, weight, bias, target, options, logits_memory, *saved), ids)


class _ExpectedGradient(torch.autograd.Function):
    """Log-probabilities and entropies, already computed, as differentiable functions of hidden, weight and bias."""

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
        *made: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, target, nll, lse, entropy, *made)
        ctx.options, ctx.logits_memory = options, logits_memory
        return 0.0 - nll, entropy.clone()

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, target, nll, lse, entropy, expected, *made = ctx.saved_tensors
        needs = Needs(*ctx.needs_input_grad[:3])
        gradients: list[torch.Tensor | None] = [None, None, None]
        number = None
        if grad is not None and grad_entropy is None:
            number = one_number(grad)
            if number is None:
                number = number_by_values(grad, target != ctx.options.ignore_index)
        if number is not None:
            wanted = [gradient if need else None for gradient, need in zip(made, needs)]
            gradients = rescaled_gradients(wanted, -number, expected, "linear_log_probs")
        elif grad is not None or grad_entropy is not None:
            arguments = (hidden, weight, target, bias, nll, lse, entropy, allocate_kept(hidden, weight, 0))
            rest = (*ctx.options, ctx.logits_memory, 0, weight.shape[0])
            gradients = recomputed_gradients(None if grad is None else -grad, grad_entropy, (*arguments, *rest), needs)
        return (*gradients, *(None,) * 10)  # target, options, logits_memory and the seven that were known already


def number_by_values(grad: torch.Tensor, valid: torch.Tensor) -> torch.Tensor | None:
    """The one value of `grad` wherever `valid`, 0-d; None if there are several. The host waits for the device.

    While a CUDA graph is captured, which forbids waiting, the answer is None.
    """
    if grad.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    low = grad.masked_fill(~valid, float("inf")).amin()
    high = grad.masked_fill(~valid, float("-inf")).amax()
    if not low >= high:  # NaN too
        return None
    return torch.where(low > high, 0.0, high)  # without a valid token low is inf and high is -inf
