"""Log-probability of every target token under an LM head, with the logits one chunk of tokens at a time.

For hidden states X `(N, H)`, head W `(V, H)` and labels t, with z the transformed logits (`logit_rows`):

    log_probs[n] = z[n, t[n]] - lse[n]          entropy[n] = lse[n] - sum_c p[n, c] * z[n, c]
    dz[n, c]     = g[n] * ([c == t[n]] - p[n, c]) - e[n] * p[n, c] * (log p[n, c] + entropy[n])

for upstream gradients g of the log-probabilities and e of the entropies, which any loss may give: supervised,
preference or policy. They are known only in the backward, which is exact in the cheapest of three ways:

    retained    the logits of the last tokens, as many as a budget in bytes holds, stay in memory until the backward:
                3 matmuls in all for these tokens
    recomputed  the logits of the other tokens are computed again in the backward, one chunk at a time: 4 matmuls
    frozen head the gradient of each log-probability with respect to its hidden state, (N, H) in fp32, is computed in
                the forward and multiplied by the upstream gradient in the backward: 2 matmuls

`linear_log_probs_gradients` has these three. The forward runs the tokens that are not retained first, in the memory
that the retained logits fill last. The backward runs the retained ones first, and then the others in their memory. So
with equal budgets for a chunk and for retained logits, retaining costs nothing at the peak.

A loss that is expected to weigh all tokens alike gives every log-probability the same upstream gradient, one number.
The forward is then that of `linear_cross_entropy`, which computes dX, dW and dbias as well: three matmuls, two for a
frozen head. The backward (`_ExpectedGradient`) has two cases:

    one number   it returns these gradients, rescaled if the number is not the expected one (`rescale`)
    any other    it recomputes the logits: three matmuls more, two for a frozen head

An upstream gradient of the entropies is the second case, and the host knows whether there is one. The gradient of a sum
is the first: autograd expands it, so its strides show that it is one number. For all others the values decide, and
reading them makes the host wait for the device.

Bytes moved besides the matmuls' own, b bytes an element: N*V*b for the statistics and 2*N*V*b for the gradient, and
2*V*H*b for every chunk after the first, to accumulate dW. Saved for backward: the inputs, two to three fp32 numbers a
token, and the retained logits, the (N, H) gradient in fp32, or all gradients where they are expected.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients, one_number, where_needed
from liger_trainer.kernels.head.head_chunks import (
    Needs,
    expected_gradient,
    logits_buffer,
    rescaled_gradients,
    retained_rows,
)
from liger_trainer.kernels.head.linear_cross_entropy import HeadInputs, loss_and_gradients
from liger_trainer.kernels.head.linear_log_probs_gradients import (
    HeadRows,
    attach_gradients,
    forward_rows,
    recomputed_gradients,
)
from liger_trainer.kernels.head.log_probs import log_probs_reference
from liger_trainer.kernels.head.loss_options import (
    LossOptions,
    check_linear,
    check_options,
    check_outputs,
    check_retain_memory,
)
from liger_trainer.kernels.head.token_statistics import (
    LOG_PROBS_OUTPUTS,
    LogProbsOutput,
    Shard,
    log_probs_with_outputs,
)
from liger_trainer.kernels.runtime import as_autocast


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
    logits_memory: int = 512 * 2**20,
    retain_memory: int | None = None,
    expected_grad: float | torch.Tensor | None = None,
) -> torch.Tensor | LogProbsOutput:
    """Log-probability of each target under ``softmax(transform(hidden @ weight.T + bias))``, one chunk at a time.

    The logits are transformed to ``softcap * tanh(x * logit_scale / softcap) / temperature`` (without `softcap`:
    ``x * logit_scale / temperature``). They are rounded to the dtype of `hidden`, as ``nn.Linear`` rounds them, and
    everything after that is fp32. Log-probabilities and entropies are differentiable, with any upstream gradient;
    double backward is an error.

    The backward is exact and takes the cheapest way: three matmuls in all for tokens whose logits were retained, four
    for the others. If only `hidden` needs a gradient there are two, the second in the forward; but a gradient of the
    entropy then recomputes the logits.

    Args:
        hidden: `(..., H)` of fp16, bf16, fp32 or float64.
        weight: `(V, H)` of the dtype of `hidden`; under autocast as in `linear_cross_entropy`; a copy in another
            dtype is saved for backward.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the token's outputs NaN.
        bias: `(V,)`, floating.
        ignore_index: Tokens with this label give 0 and no gradient.
        temperature: Divides the logits after the soft-cap, more than 0.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        outputs: Names among "entropy", "top1", "mean_logit" and "sum_squared_probs".
        logits_memory: Bytes for the chunk of logits, 512 MiB by default. Half-precision weight gradients of more than
            8 chunks are summed in fp32 (not on NVIDIA GPUs from Hopper on, which need no fp32 sum); if a larger buffer
            costs less memory than that sum, the buffer exceeds this.
        retain_memory: Bytes of logits retained for the backward: 2 * N * V bytes in half precision retain all of them
            and are fastest, 0 retains none. By default one chunk, whose memory forward and backward need anyway.
        expected_grad: For a loss that weighs all tokens alike: the upstream gradient to expect for the sum of the
            negative log-probabilities, a number or a 0-d tensor; None (the default) for any other loss. The gradients
            are then computed in the forward, in three matmuls and without retained logits. The backward is exact for
            every upstream gradient: if it is the same for all tokens, the gradients are ready; if it is not, or the
            entropies have one, the logits are recomputed. The gradient of a sum is known to be the same for all tokens;
            for any other, the host waits for the device to find out. Not used with "mean_logit" and
            "sum_squared_probs", nor under `torch.compile`.

    Returns:
        fp32 log-probabilities (float64 for float64 inputs) shaped as `target`; with `outputs` a `LogProbsOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    options = LossOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    check_options(options, "none", None, ())
    check_outputs(outputs, LOG_PROBS_OUTPUTS)
    hidden, weight, bias = as_autocast(hidden), as_autocast(weight), as_autocast(bias)
    check_linear(hidden, weight, target, bias, logits_memory)
    check_retain_memory(retain_memory)
    return log_probs_of_head(
        hidden, weight, target, bias, options, outputs, logits_memory, retain_memory, expected_grad
    )


def log_probs_of_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: LossOptions,
    outputs: Sequence[str],
    logits_memory: int,
    retain_memory: int | None,
    expected_grad: float | torch.Tensor | None,
) -> torch.Tensor | LogProbsOutput:
    """`linear_log_probs` without its checks and casts, for arguments that are known to pass them."""
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    needs = Needs.of(hidden, weight, bias)
    asked = ("entropy" in outputs, "top1" in outputs, "mean_logit" in outputs, "sum_squared_probs" in outputs)
    in_forward = any(needs) and not any(asked[2:]) and target.numel() > 0 and not torch.compiler.is_compiling()
    if expected_grad is not None and in_forward:
        one = torch.ones((), dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
        with torch.no_grad():
            expected = expected_gradient(expected_grad, one, flat.dtype)
            _, *gradients, nll, lse, entropy, predicted = loss_and_gradients(
                HeadInputs(flat, weight, labels, bias), one, expected, options, logits_memory, *asked[:2], needs
            )
        chosen, entropy = _ExpectedGradient.apply(
            flat, weight, bias, labels, options, logits_memory, nll, lse, entropy, expected, *gradients
        )
        mean_logit = squares = flat.new_empty(0)
    else:
        frozen_head = needs == (True, False, False)
        retain = retained_rows(flat, weight, logits_memory, retain_memory) if any(needs) and not frozen_head else 0
        with torch.no_grad():
            nll, lse, entropy, predicted, mean_logit, squares, retained, unit_gradient = forward_rows(
                flat, weight, labels, bias, options, logits_memory, retain, *asked, frozen_head
            )
        if any(needs):
            rows, shard = HeadRows(flat, weight, labels, bias, nll, lse, entropy, retained), Shard(0, weight.shape[0])
            nll, entropy = attach_gradients(nll, unit_gradient, rows, options, logits_memory, shard, "")
        chosen = 0.0 - nll
    return log_probs_with_outputs(
        chosen, entropy, predicted, mean_logit, squares, labels, options.ignore_index, outputs, target.shape
    )


class _ExpectedGradient(torch.autograd.Function):
    """Log-probabilities and entropies, already known, as differentiable functions of hidden, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        options: LossOptions,
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
            wanted = list(where_needed(needs, *computed))
            gradients = rescaled_gradients(wanted, -number, expected, "linear_log_probs")
        elif grad is not None or grad_entropy is not None:
            rows = HeadRows(hidden, weight, target, bias, nll, lse, entropy, logits_buffer(hidden, weight, 0))
            upstream, shard = None if grad is None else -grad, Shard(0, weight.shape[0])
            gradients = recomputed_gradients(upstream, grad_entropy, rows, ctx.options, ctx.logits_memory, shard, needs)
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


def linear_log_probs_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | LogProbsOutput:
    """`linear_log_probs` in plain torch: all logits at once, then `log_probs_reference` with its `options`."""
    return log_probs_reference(torch.nn.functional.linear(hidden, weight, bias), target, **options)
