"""The gradients of log-probabilities and entropies over an LM head, for upstream gradients that come later.

The gradient of a row of logits needs the upstream gradient of its token, which only the backward knows. The logits of
the last tokens were retained by the forward; those of all others are recomputed here, one chunk at a time:

    for each chunk of tokens:   Z = X_c @ W.T          not for retained logits
                                Z = dL/dZ              in place, one kernel (`cross_entropy_kernel`)
                                dX_c = Z @ W           dW += Z.T @ X_c          dbias += sum of the rows of Z, fp32

`attach_gradients` makes a loss and entropies that are already known differentiable in this way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import COLLECTIVES
from liger_trainer.kernels.autograd import input_gradients, refuse_double_backward, where_needed
from liger_trainer.kernels.head.cross_entropy_kernel import row_gradient_
from liger_trainer.kernels.head.head_chunks import Needs, allocate_gradients, chunk_spans, saturating_chunk_rows
from liger_trainer.kernels.head.row_statistics import RowOptions, RowStats, Shard, compute_dtype
from liger_trainer.kernels.head.weight_gradient import WeightGradientSum
from liger_trainer.kernels.matmul import fp32_reductions, matmul_into
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import graph_is_kept

if dist.is_available():
    require(COLLECTIVES)

_Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dX, dW and dbias, empty if not needed


def _run_chunks(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    stats: RowStats,
    retained: torch.Tensor,
    options: RowOptions,
    logits_memory: int,
    shard: Shard,
    needs: Needs,
    overwrite: bool,
) -> _Gradients:
    """dX, dW and dbias for upstream gradients of the token losses and of the entropies.

    With `overwrite`, the retained logits become their gradient, and their memory then serves the other chunks. Without
    it they are only read, one chunk at a time.
    """
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    d_hidden, d_weight, d_bias = allocate_gradients(hidden, weight, bias, needs)
    if tokens == 0:
        return d_hidden, d_weight.zero_(), d_bias.zero_()
    others = tokens - retained.shape[0]
    rows = saturating_chunk_rows(hidden[:others] if overwrite else hidden, weight, logits_memory, needs.weight)
    spans = [*chunk_spans(others, tokens, tokens if overwrite else rows), *chunk_spans(0, others, rows)]
    buffer = retained
    if not overwrite or (others > 0 and retained.shape[0] < rows):
        buffer = hidden.new_empty(min(rows, tokens), retained.shape[1])
    weight_sum = WeightGradientSum(d_weight, len(spans)) if needs.weight else None
    bias_sum = d_bias.new_zeros(d_bias.shape, dtype=compute_dtype(hidden))
    with fp32_reductions(weight):
        for start, stop in spans:
            part = hidden[start:stop]
            logits = gradient = buffer[: stop - start, :vocab_size]
            if start < others:
                torch.mm(part, weight.t(), out=logits)
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
            if needs.hidden:
                matmul_into(d_hidden[start:stop], gradient, weight)
            if weight_sum is not None:
                weight_sum.add(gradient, part)
            if needs.bias:
                bias_sum += gradient.sum(0, dtype=bias_sum.dtype)
    if weight_sum is not None:
        weight_sum.finish()
    return d_hidden, d_weight, d_bias.copy_(bias_sum)


@operator("liger_trainer::linear_rows_gradients")
def _gradients(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    nll: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    retained: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    logits_memory: int,
    vocab_start: int,
    vocab_size: int,
    hidden_gradient: bool,
    weight_gradient: bool,
    bias_gradient: bool,
) -> _Gradients:
    """dX, dW and dbias for upstream gradients of the token losses and, unless None, of the entropies."""
    stats, shard = RowStats.of_backward(nll, lse, entropy), Shard(vocab_start, vocab_size)
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    needs = Needs(hidden_gradient, weight_gradient, bias_gradient)
    return _run_chunks(
        grad, grad_entropy, hidden, weight, target, bias, stats, retained, options, logits_memory, shard, needs,
        overwrite=False,
    )  # fmt: skip


@_gradients.register_fake
def _(
    grad, grad_entropy, hidden, weight, target, bias, nll, lse, entropy, retained,
    ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature, logits_memory, vocab_start, vocab_size,
    hidden_gradient, weight_gradient, bias_gradient,
):  # fmt: skip
    return allocate_gradients(hidden, weight, bias, Needs(hidden_gradient, weight_gradient, bias_gradient))


def recomputed_gradients(
    grad: torch.Tensor | None,
    grad_entropy: torch.Tensor | None,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    nll: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    retained: torch.Tensor,
    options: RowOptions,
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
        computed = _gradients(
            grad, grad_entropy, hidden, weight, target, bias, nll, lse, entropy, retained, *options, logits_memory,
            *shard, *needs,
        )  # fmt: skip
    else:
        computed = _run_chunks(
            grad, grad_entropy, hidden, weight, target, bias, RowStats.of_backward(nll, lse, entropy), retained,
            options, logits_memory, shard, needs, overwrite=True,
        )  # fmt: skip
    return list(where_needed(needs, *computed))


@operator("liger_trainer::linear_rows_attach")
def attach_gradients(
    loss: torch.Tensor,
    unit_gradient: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    nll: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor,
    retained: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    temperature: float,
    logits_memory: int,
    vocab_start: int,
    vocab_size: int,
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`loss` and `entropy`, which are already known, as differentiable functions of hidden, weight and bias.

    `unit_gradient`, `(N, H)` or empty, is dX for upstream gradients of 1. If `group` is the name of a process group,
    each of its processes holds a shard of the vocabulary, and dX is summed over them.
    """
    return loss.clone(), entropy.clone()


@attach_gradients.register_fake
def _(
    loss, unit_gradient, hidden, weight, target, bias, nll, lse, entropy, retained,
    ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature, logits_memory, vocab_start, vocab_size,
    group,
):  # fmt: skip
    return torch.empty_like(loss), torch.empty_like(entropy)


def _attach_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _loss, *tensors = inputs[:10]
    *options, logits_memory, vocab_start, vocab_size, group = inputs[10:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.options, ctx.logits_memory = RowOptions(*options), logits_memory
    ctx.shard, ctx.group = Shard(vocab_start, vocab_size), group


def _attach_backward(
    ctx: Any, grad: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if grad is None and grad_entropy is None:
        return input_gradients(ctx)
    unit_gradient, hidden, weight, target, bias, nll, lse, entropy, retained = ctx.saved_tensors
    _, _, hidden_gradient, weight_gradient, _, bias_gradient, *_ = ctx.needs_input_grad
    if unit_gradient.dim() == 2 and grad is not None and grad_entropy is None:
        refuse_double_backward("linear_log_probs")
        valid = target != ctx.options.ignore_index
        return input_gradients(ctx, None, None, _scaled_rows(unit_gradient, grad, valid, hidden))
    needs = Needs(hidden_gradient, weight_gradient, bias_gradient)
    d_hidden, d_weight, d_bias = recomputed_gradients(
        grad, grad_entropy, hidden, weight, target, bias, nll, lse, entropy, retained,
        ctx.options, ctx.logits_memory, ctx.shard, needs,
    )  # fmt: skip
    if ctx.group and d_hidden is not None:
        collectives = torch.ops._c10d_functional  # traced by torch.compile, and the same in eager mode
        d_hidden = collectives.wait_tensor(collectives.all_reduce(d_hidden, "sum", ctx.group))
    return input_gradients(ctx, None, None, d_hidden, d_weight, None, d_bias)


def _scaled_rows(rows: torch.Tensor, factor: torch.Tensor, valid: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Each of `rows` times its factor, 0 unless `valid`, rounded once, to the dtype of `like`."""
    factor = torch.where(valid, factor, 0.0).unsqueeze(-1)
    return torch.mul(rows, factor, out=torch.empty_like(like))


attach_gradients.register_autograd(_attach_backward, setup_context=_attach_setup)
