"""The gradients of log-probabilities and entropies over an LM head, which depend on upstream gradients that come later.

The gradient of a row of logits needs the upstream gradient of its token, which only the backward knows. The logits of
the last tokens were retained by the forward; those of all others are recomputed here, one chunk at a time:

    for each chunk of tokens:   Z = X_c @ W.T          not for retained logits
                                Z = dL/dZ              in place, one kernel (`cross_entropy_kernel`)
                                dX_c = Z @ W           dW += Z.T @ X_c          dbias += sum of the rows of Z, fp32

`attach_gradients` makes a loss and entropies that are already known differentiable in this way.

`log_probs_with_gradients` is for an expected upstream gradient. A loss that weighs all tokens alike gives every
log-probability the same upstream gradient, one number. The forward is then that of `linear_cross_entropy`, which
computes dX, dW and dbias as well: three matmuls, two for a frozen head. The backward has two cases:

    one number   it returns these gradients, rescaled if the number is not the expected one (`rescale`)
    any other    it recomputes the logits, as above: three matmuls more, two for a frozen head

An upstream gradient of the entropies is the second case, and the host knows whether there is one. The gradient of a sum
is the first: autograd expands it, so its strides show that it is one number. For all others the values decide, and
reading them makes the host wait for the device. Saved for backward: the gradients, and for the second case the inputs
and three fp32 numbers a token.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import COLLECTIVES
from liger_trainer.kernels.autograd import input_gradients, one_number, refuse_double_backward, where_needed
from liger_trainer.kernels.head.cross_entropy_kernel import row_gradient_
from liger_trainer.kernels.head.head_chunks import (
    HeadGradients,
    Needs,
    allocate_gradients,
    chunk_spans,
    logits_buffer,
    saturating_chunk_rows,
)
from liger_trainer.kernels.head.linear_cross_entropy import HeadInputs, loss_and_gradients
from liger_trainer.kernels.head.loss_options import LossOptions, compute_dtype
from liger_trainer.kernels.head.rescale import expected_gradient, rescaled_gradients
from liger_trainer.kernels.head.token_statistics import RowStats, Shard
from liger_trainer.kernels.matmul import fp32_reductions
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import graph_is_kept

if dist.is_available():
    require(COLLECTIVES)

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dX, dW and dbias, empty if not needed


class HeadRows(NamedTuple):
    """A head and its tokens, with the statistics of their logits.

    Args:
        hidden: (N, H).
        weight: (V, H).
        target: (N,).
        bias: (V,), or None.
        nll: (N,), as the other statistics.
        lse: See `RowStats`.
        entropy: See `RowStats`; empty if it has no gradient.
        retained: The logits of the last tokens, each row padded.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    nll: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    retained: torch.Tensor


def _run_chunks(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    rows: HeadRows,
    options: LossOptions,
    logits_memory: int,
    shard: Shard,
    needs: Needs,
    overwrite: bool,
) -> _Gradients:
    """dX, dW and dbias for upstream gradients of the token losses and of the entropies.

    With `overwrite`, the retained logits become their gradient, and their memory then serves the other chunks. Without
    it they are only read, one chunk at a time.
    """
    hidden, weight, target, bias, nll, lse, entropy, retained = rows
    stats = RowStats.of_backward(nll, lse, entropy)
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    if tokens == 0:
        return HeadGradients(hidden, weight, bias, needs, 0).finish()
    others = tokens - retained.shape[0]
    step = saturating_chunk_rows(hidden[:others] if overwrite else hidden, weight, logits_memory, needs.weight_gradient)
    spans = [*chunk_spans(others, tokens, tokens if overwrite else step), *chunk_spans(0, others, step)]
    gradients = HeadGradients(hidden, weight, bias, needs, len(spans))
    buffer = retained
    if not overwrite or (others > 0 and retained.shape[0] < step):
        buffer = hidden.new_empty(min(step, tokens), retained.shape[1])
    with fp32_reductions(weight):
        for start, stop in spans:
            logits = gradient = buffer[: stop - start, :vocab_size]
            if start < others:
                torch.mm(hidden[start:stop], weight.t(), out=logits)
            else:
                logits = retained[start - others : stop - others, :vocab_size]
                gradient = logits if overwrite else gradient
            row_gradient_(
                logits,
                target[start:stop],
                stats.rows(start, stop),
                options,
                grad[start:stop],
                bias,
                out=None if gradient is logits else gradient,
                width=retained.shape[1],
                entropy_coefficient=None if grad_entropy is None else grad_entropy[start:stop],
                shard=shard,
            )
            gradients.add(start, stop, gradient)
    return gradients.finish()


@operator("liger_trainer::linear_rows_gradients")
def _gradients(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    rows: HeadRows,
    options: LossOptions,
    logits_memory: int,
    shard: Shard,
    needs: Needs,
) -> _Gradients:
    """dX, dW and dbias for upstream gradients of the token losses and, unless None, of the entropies."""
    return _run_chunks(grad, grad_entropy, rows, options, logits_memory, shard, needs, overwrite=False)


@_gradients.register_fake
def _(grad, grad_entropy, rows, options, logits_memory, shard, needs):
    return allocate_gradients(rows.hidden, rows.weight, rows.bias, needs)


def recomputed_gradients(
    grad: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    rows: HeadRows,
    options: LossOptions,
    logits_memory: int,
    shard: Shard,
    needs: Needs,
) -> list[torch.Tensor | None]:
    """dX, dW and dbias, None if not needed; for use inside a backward.

    At least one of `grad` and `grad_entropy`, the upstream gradients of the token losses and of the entropies, is not
    None. The last backward of a graph overwrites the retained logits; one that keeps its graph only reads them.
    """
    refuse_double_backward("linear_log_probs")
    given = grad if grad is not None else grad_entropy
    assert given is not None
    if grad is None:
        grad = torch.zeros((), dtype=given.dtype, device=given.device).expand_as(given)
    # Tracing passes subclasses of Tensor; the operator then stands in the graph.
    if graph_is_kept() or type(given) is not torch.Tensor:
        computed = _gradients(grad, grad_entropy, rows, options, logits_memory, shard, needs)
    else:
        computed = _run_chunks(grad, grad_entropy, rows, options, logits_memory, shard, needs, overwrite=True)
    return list(where_needed(needs, *computed))


@operator("liger_trainer::linear_rows_attach")
def attach_gradients(
    loss: torch.Tensor,
    unit_gradient: torch.Tensor,
    rows: HeadRows,
    options: LossOptions,
    logits_memory: int,
    shard: Shard,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`loss` and the entropies, which are already known, as differentiable functions of hidden, weight and bias.

    `unit_gradient`, `(N, H)` or empty, is dX for upstream gradients of 1. If `group` is the name of a process group,
    each of its processes holds a shard of the vocabulary, and dX is summed over them.
    """
    return loss.clone(), rows.entropy.clone()


@attach_gradients.register_fake
def _(loss, unit_gradient, rows, options, logits_memory, shard, group):
    return torch.empty_like(loss), torch.empty_like(rows.entropy)


def _attach_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _loss, unit_gradient, rows, ctx.options, ctx.logits_memory, ctx.shard, ctx.group = inputs
    ctx.save_for_backward(unit_gradient, *rows)


def _attach_backward(
    ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    unit_gradient, *tensors = ctx.saved_tensors
    rows = HeadRows(*tensors)
    _, _, hidden_gradient, weight_gradient, _, bias_gradient, *_ = ctx.needs_input_grad
    if unit_gradient.dim() == 2 and grad is not None and grad_entropy is None:
        refuse_double_backward("linear_log_probs")
        valid = rows.target != ctx.options.ignore_index
        return input_gradients(ctx, None, None, _scaled_rows(unit_gradient, grad, valid, rows.hidden))
    needs = Needs(hidden_gradient, weight_gradient, bias_gradient)
    d_hidden, d_weight, d_bias = recomputed_gradients(
        grad, grad_entropy, rows, ctx.options, ctx.logits_memory, ctx.shard, needs
    )
    if ctx.group and d_hidden is not None:
        collectives = torch.ops._c10d_functional  # traced by torch.compile, and the same in eager mode
        d_hidden = collectives.wait_tensor(collectives.all_reduce(d_hidden, "sum", ctx.group))
    return input_gradients(ctx, None, None, d_hidden, d_weight, None, d_bias)


def _scaled_rows(rows: torch.Tensor, factor: torch.Tensor, valid: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Each of `rows` times its factor, 0 unless `valid`, rounded once, to the dtype of `like`."""
    factor = torch.where(valid, factor, 0.0).unsqueeze(-1)
    return torch.mul(rows, factor, out=torch.empty_like(like))


attach_gradients.register_autograd(_attach_backward, setup_context=_attach_setup)


def log_probs_with_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: LossOptions,
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
            HeadInputs(hidden, weight, target, bias), one, expected, options, logits_memory, entropy, predicted, needs
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
