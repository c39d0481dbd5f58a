"""A loss of the log-probabilities of an LM head, whose gradient is computed in the forward, chunk by chunk.

Preference losses couple the tokens of a pair or of a sequence, and policy losses not even those; none couples all the
tokens of a batch once its normaliser is known. So the upstream gradient of a token's log-probability is known as soon
as the log-probabilities of its group are. For each chunk of whole groups:

    Z = X_c @ W.T            into one buffer
    l = log-probabilities    one pass over Z (`cross_entropy_kernel`)
    g = d loss / d l         torch's autograd through the loss, one value per token of the chunk
    Z = dZ                   in place, one pass
    dX_c = Z @ W             dW += Z.T @ X_c

This takes three matmuls for a trained head, where a loss of `linear_log_probs` takes four in the same memory. A frozen
head takes two either way, and `linear_log_probs` needs fewer logits at a time for it, so it runs there; it also runs
where the logits of one group exceed the memory.

Shapes: N tokens, H hidden size, V vocabulary; X (N, H), W (V, H), l (N,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels.head.head_chunks import (
    HeadGradients,
    Needs,
    chunk_rows,
    expected_gradient,
    logits_buffer,
    rescaled_gradients,
)
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs
from liger_trainer.kernels.head.loss_options import LossOptions, check_linear, check_transform
from liger_trainer.kernels.head.token_statistics import ExtraStats, LogProbsOutput, RowStats, check_labels_on_cpu
from liger_trainer.kernels.runtime import as_autocast, cdiv, fp32_reductions, saved_as_is

Formula = Callable[[torch.Tensor, int, int], torch.Tensor]
"""``formula(log_probs, start, stop)``: the contribution of tokens `start` to `stop`, whole groups, to the loss, 0-d."""


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class GroupedLoss(NamedTuple):
    """The 0-d loss, with a gradient, and each token's log-probability and mean logit, without one."""

    loss: torch.Tensor
    log_probs: torch.Tensor
    mean_logit: torch.Tensor | None


class _GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        formula: Formula,
        rows: int,
        options: LossOptions,
        mean_logit: bool,
        expected: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = hidden.shape[0]
        stats = RowStats.allocate(hidden, tokens, entropy=False, predicted=False)
        extra = ExtraStats.allocate(hidden, tokens, mean_logit, sum_squared_probs=False)
        total = stats.nll.new_zeros(())

        check_labels_on_cpu(target, weight.shape[0], options.ignore_index)
        needs = Needs(*ctx.needs_input_grad[:3])
        sums = HeadGradients(hidden, weight, bias, needs, cdiv(tokens, rows))
        buffer = logits_buffer(hidden, weight, rows)
        with fp32_reductions(weight):
            for start in range(0, tokens, rows):
                stop = min(start + rows, tokens)
                labels, found = target[start:stop], stats.rows(start, stop)
                logits = torch.mm(hidden[start:stop], weight.t(), out=buffer[: stop - start, : weight.shape[0]])
                width = buffer.shape[1]
                row_statistics_(logits, labels, found, options, bias, width=width, extra=extra.rows(start, stop))
                nll = found.nll.detach().requires_grad_()
                # Saved-tensor hooks around the call, such as a checkpoint's, must not see this graph, which ends here.
                with torch.enable_grad(), saved_as_is():
                    loss = formula(0.0 - nll, start, stop)
                (upstream,) = torch.autograd.grad(loss, nll, expected.to(loss.dtype))
                total.add_(loss.detach())
                row_gradient_(logits, labels, found, options, upstream.contiguous(), bias, width=width)
                sums.add(start, stop, logits)
        gradients = sums.finish()
        log_probs = 0.0 - stats.nll
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(log_probs, extra.mean_logit)
        ctx.save_for_backward(*(gradient if need else None for gradient, need in zip(gradients, needs)), expected)
        return total, log_probs, extra.mean_logit

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, _log_probs: None, _mean_logit: None
    ) -> tuple[torch.Tensor | None, ...]:
        dhidden = dweight = dbias = None
        if grad is not None:
            *gradients, expected = ctx.saved_tensors
            dhidden, dweight, dbias = rescaled_gradients(gradients, grad, expected, "a loss over a head")
        return dhidden, dweight, dbias, None, None, None, None, None, None


@torch.compiler.disable
def linear_grouped_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    formula: Formula,
    group: int,
    normalizer: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    mean_logit: bool = False,
    logits_memory: int = 2**30,
    arrange: Callable[[torch.Tensor], torch.Tensor] = _identity,
) -> GroupedLoss:
    """The loss ``formula(linear_log_probs(hidden, weight, target))``, in the fewest matmuls that the memory allows.

    ``torch.compile`` breaks its graph at this function.

    Args:
        hidden: `(N, H)`.
        weight: `(V, H)`.
        target: `(N,)` labels.
        formula: The loss as a sum over groups, differentiable in torch. It is called once per chunk, with any whole
            number of consecutive groups.
        group: Number of consecutive tokens that the formula couples; a divisor of N.
        normalizer: 0-d, about the inverse of the loss's largest derivative by a log-probability. In fp16, gradients are
            multiplied by a power of two of at most this until the backward, so that they do not underflow.
        bias: `(V,)`, or None.
        ignore_index: Tokens with this label have log-probability 0 and no gradient.
        temperature: Divides the logits.
        mean_logit: Whether to return the mean logits.
        logits_memory: Bytes of logits at a time, as in `linear_log_probs`.
        arrange: Permutes `(N, ...)` rows so that the tokens of a group are adjacent. The formula and the results use
            this order.

    Returns:
        A `GroupedLoss`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    check_transform(temperature)
    hidden, weight, bias = as_autocast(hidden), as_autocast(weight), as_autocast(bias)
    check_linear(hidden, weight, target, bias, logits_memory)
    grad_enabled = torch.is_grad_enabled()
    trained = grad_enabled and any(tensor is not None and tensor.requires_grad for tensor in (weight, bias))
    rows = chunk_rows(hidden, weight, logits_memory, trained and weight.requires_grad, group) if trained else 0
    if rows == 0:
        outputs = ("mean_logit",) if mean_logit else ()
        result = linear_log_probs(
            hidden, weight, target, bias, ignore_index, temperature, outputs=outputs, logits_memory=logits_memory
        )
        if not isinstance(result, LogProbsOutput):
            result = LogProbsOutput(result)
        log_probs = arrange(result.log_probs)
        mean_logits = None if result.mean_logit is None else arrange(result.mean_logit)
        return GroupedLoss(formula(log_probs, 0, len(target)), log_probs.detach(), mean_logits)
    options = LossOptions(ignore_index, 0.0, 0.0, None, 1.0, temperature)
    scale = 1.0 / normalizer.detach().clamp(min=1.0)
    expected = expected_gradient(None, scale, hidden.dtype)
    hidden, target = arrange(hidden).contiguous(), arrange(target).contiguous()
    loss, log_probs, mean_logits = _GradientInForward.apply(
        hidden, weight, bias, target, formula, rows, options, mean_logit, expected
    )
    return GroupedLoss(loss, log_probs, mean_logits if mean_logit else None)
