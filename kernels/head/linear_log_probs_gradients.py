"""Log-probabilities and entropies over an LM head, from logits that are retained for the backward or recomputed in it.

The gradient of a row of logits needs the upstream gradient of its token, which only the backward knows. So the forward
(`forward_rows`) retains the logits of the last tokens, and those of all others are recomputed in the backward, one
chunk at a time:

    for each chunk of tokens:   Z = X_c @ W.T          not for retained logits
                                Z = dL/dZ              in place, one kernel (`cross_entropy_kernel`)
                                dX_c = Z @ W           dW += Z.T @ X_c          dbias += sum of the rows of Z, fp32

`attach_gradients` makes a loss and entropies that are already known differentiable in this way.

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import COLLECTIVES
from liger_trainer.kernels.autograd import input_gradients, refuse_double_backward, where_needed
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels.head.head_chunks import (
    HeadGradients,
    Needs,
    logits_buffer,
    saturating_chunk_rows,
)
from liger_trainer.kernels.head.loss_options import LossOptions
from liger_trainer.kernels.head.token_statistics import ExtraStats, RowStats, Shard, check_labels_on_cpu
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import fp32_reductions, graph_is_kept, matmul_into

if dist.is_available():
    require(COLLECTIVES)

_T = torch.Tensor
_Gradients = tuple[_T, _T, _T]  # dX, dW and dbias, empty if not needed
_Statistics = tuple[_T, _T, _T, _T, _T, _T, _T, _T]  # all but `loss` of `RowStats`, `ExtraStats`, logits, dnll/dhidden


def forward_logits(
    hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, retain: int, retained: list[torch.Tensor]
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields (start, stop, logits) of every chunk of tokens; the last `retain` tokens come last, as one chunk.

    Appends the memory of their logits to `retained`.
    """
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    others = tokens - retain
    rows = saturating_chunk_rows(hidden, weight, logits_memory, weight_gradient=False)
    buffer = logits_buffer(hidden, weight, max(retain, min(rows, others)))
    for start in range(0, others, rows):
        stop = min(start + rows, others)
        yield start, stop, torch.mm(hidden[start:stop], weight.t(), out=buffer[: stop - start, :vocab_size])
    if buffer.shape[0] != retain:
        del buffer
        buffer = logits_buffer(hidden, weight, retain)
    retained.append(buffer)
    if retain:
        yield others, tokens, torch.mm(hidden[others:], weight.t(), out=buffer[:, :vocab_size])


@operator("liger_trainer::linear_log_probs_rows")
def forward_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: LossOptions,
    logits_memory: int,
    retain: int,
    entropy: bool,
    predicted: bool,
    mean_logit: bool,
    sum_squared_probs: bool,
    unit_gradient: bool,
) -> _Statistics:
    """nll, lse, entropy and predicted of `RowStats`, `ExtraStats`, the retained logits and dnll/dhidden."""
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    extra = ExtraStats.allocate(hidden, target.numel(), mean_logit, sum_squared_probs)
    gradient = _allocate_unit_gradient(hidden, unit_gradient)
    check_labels_on_cpu(target, weight.shape[0], options.ignore_index)
    one = stats.loss.new_ones(()) if gradient.numel() else None
    retained: list[torch.Tensor] = []
    with fp32_reductions(weight):
        for start, stop, logits in forward_logits(hidden, weight, logits_memory, retain, retained):
            labels, found, more = target[start:stop], stats.rows(start, stop), extra.rows(start, stop)
            row_statistics_(logits, labels, found, options, bias, None, one, logits.stride(0), extra=more)
            if one is not None:
                matmul_into(gradient[start:stop], logits, weight)
    return stats.nll, stats.lse, stats.entropy, stats.predicted, *extra, retained[0], gradient


def _allocate_unit_gradient(hidden: torch.Tensor, wanted: bool) -> torch.Tensor:
    """Memory for dnll/dhidden. Not in the dtype of `hidden`: its product with the upstream gradient is rounded too."""
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    return torch.empty_like(hidden, dtype=dtype) if wanted else hidden.new_empty(0)


@forward_rows.register_fake
def _(
    hidden, weight, target, bias, options, logits_memory, retain, entropy, predicted, mean_logit, sum_squared_probs,
    unit_gradient,
):  # fmt: skip
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    extra = ExtraStats.allocate(hidden, target.numel(), mean_logit, sum_squared_probs)
    gradient = _allocate_unit_gradient(hidden, unit_gradient)
    return (*stats[1:], *extra, logits_buffer(hidden, weight, retain), gradient)


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
    retained_step = max(1, retained.shape[0]) if overwrite else step
    starts = [*range(others, tokens, retained_step), *range(0, others, step)]
    gradients = HeadGradients(hidden, weight, bias, needs, len(starts))
    buffer = retained
    if not overwrite or (others > 0 and retained.shape[0] < step):
        buffer = hidden.new_empty(min(step, tokens), retained.shape[1])
    with fp32_reductions(weight):
        for start in starts:
            stop = min(start + step, others) if start < others else min(start + retained_step, tokens)
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
    return HeadGradients(rows.hidden, rows.weight, rows.bias, needs, 0).results


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
