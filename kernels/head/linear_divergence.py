"""Distillation with both LM heads in one operator: the logits of the two models exist one chunk of tokens at a time.

For hidden states X `(N, H)` and head W `(V, H)` of the student and those of the teacher, which may have another hidden
size, and a divergence L of their logits (`divergence`):

    for each chunk of tokens:   Z = X_c @ W.T,  T = X_teacher_c @ W_teacher.T     into two buffers, fp32
                                dZ = dL/dZ             over Z, in the dtype of X, one kernel (`divergence_kernel`)
                                dX_c = dZ @ W          dW += dZ.T @ X_c         dbias += sum of the rows of dZ, fp32

four matmuls, three for a frozen student head. The logits are the matmul's fp32 results: where student and teacher
nearly agree, dZ is a difference of nearly equal numbers, and rounding the logits to half precision would change it by
several percent. The gradients are computed in the forward, and the backward has only the upstream gradient to apply
(`rescale`), as in `linear_cross_entropy`.

Bytes moved besides the matmuls' own, b bytes an element of X: at most N*V*(16 + b) for the row kernel (jsd 24 + b) and
2*V*H*b for each chunk after the first, to accumulate dW. Memory: two chunks of logits, dX, dW. Saved for backward: dX,
dW and dbias.

The public functions are in `linear_jsd` and, for a teacher given as probabilities, in `liger/operators/linear_kl_div`.

Shapes: N tokens, H hidden size, V vocabulary, which is that of both heads; H_teacher hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.autograd import input_gradients, where_needed
from liger_trainer.kernels.head.divergence import (
    DivergenceOptions,
    DivergenceOutput,
    DivergenceStats,
    check_divergence_options,
    divergence_of_logits_reference,
    logits_reference,
)
from liger_trainer.kernels.head.divergence_kernel import divergence_rows_, gradient_memory
from liger_trainer.kernels.head.head_chunks import (
    COLUMN_MULTIPLE,
    HeadGradients,
    Needs,
    chunk_rows,
    expected_gradient,
    rescaled_gradients,
)
from liger_trainer.kernels.head.loss_options import (
    check_logits_memory,
    check_num_items,
    check_tokens,
    inverse_normalizer,
)
from liger_trainer.kernels.head.token_statistics import check_labels_on_cpu
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import cdiv, fp32_reductions, matmul_into, multiplies_into_fp32

_T = torch.Tensor
_LossAndGradients = tuple[_T, _T, _T, _T, _T, _T, _T]  # loss, dX, dW, dbias, and the fields of `DivergenceStats`
_FUNCTIONS = "linear_jsd, linear_kl, linear_kl_div and linear_cosine_distance"


def _logits_dtype(hidden: torch.Tensor) -> torch.dtype:
    """The dtype of the logits: fp32 if the device multiplies half precision into fp32, else that of `hidden`."""
    return torch.promote_types(hidden.dtype, torch.float32) if multiplies_into_fp32(hidden.device) else hidden.dtype


class TwoHeads(NamedTuple):
    """Student and teacher, with the labels of their tokens.

    Args:
        hidden: (N, H), contiguous.
        weight: (V, H).
        bias: (V,), or None.
        teacher: Hidden states (N, H_teacher), or without a `teacher_weight` the probabilities themselves.
        teacher_weight: (V, H_teacher), or None.
        teacher_bias: (V,), or None.
        labels: (N,), or None if every token counts.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    teacher: torch.Tensor
    teacher_weight: torch.Tensor | None
    teacher_bias: torch.Tensor | None
    labels: torch.Tensor | None


def _run_chunks(
    heads: TwoHeads,
    coefficient: torch.Tensor,
    options: DivergenceOptions,
    vocab_size: int,
    logits_memory: int,
    stats: DivergenceStats,
    needs: Needs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fills `stats` and returns dX, dW and dbias, empty if not needed."""
    hidden, weight, bias, teacher, teacher_weight, teacher_bias, labels = heads
    tokens = hidden.shape[0]
    if labels is not None and stats.hard.numel():
        check_labels_on_cpu(labels, vocab_size, options.ignore_index)
    head = weight[:vocab_size]
    dtype, teacher_dtype = _logits_dtype(hidden), _logits_dtype(teacher)
    class_bytes = dtype.itemsize + (0 if teacher_weight is None else teacher_dtype.itemsize)
    rows = chunk_rows(hidden, head, logits_memory, needs.weight_gradient, class_bytes=class_bytes)
    gradients = HeadGradients(hidden, weight, bias, needs, cdiv(tokens, rows), vocab_size)
    if tokens == 0:
        return gradients.finish()
    width = vocab_size + -vocab_size % COLUMN_MULTIPLE
    buffer = hidden.new_empty(rows, width, dtype=dtype)
    gradient_buffer = gradient_memory(buffer, hidden.dtype, options.divergence)
    teacher_buffer = teacher.new_empty(rows if teacher_weight is not None else 0, width, dtype=teacher_dtype)
    with fp32_reductions(head):
        for start in range(0, tokens, rows):
            stop = min(start + rows, tokens)
            logits, gradient = (memory[: stop - start, :vocab_size] for memory in (buffer, gradient_buffer))
            matmul_into(logits, hidden[start:stop], head.t())
            if teacher_weight is None:
                target, target_width = teacher[start:stop, :vocab_size], vocab_size
            else:
                target, target_width = teacher_buffer[: stop - start, :vocab_size], width
                matmul_into(target, teacher[start:stop], teacher_weight[:vocab_size].t())
            divergence_rows_(
                logits,
                target,
                None if labels is None else labels[start:stop],
                stats.rows(start, stop),
                options,
                None if bias is None else bias[:vocab_size],
                None if teacher_bias is None else teacher_bias[:vocab_size],
                None if not any(needs) else coefficient[start:stop] if coefficient.dim() else coefficient,
                width,
                target_width,
                gradient,
            )
            gradients.add(start, stop, gradient)
    return gradients.finish()


@operator("liger_trainer::linear_divergence")
def _linear_divergence(
    heads: TwoHeads,
    token_weights: torch.Tensor | None,
    scale: torch.Tensor,
    expected: torch.Tensor,
    options: DivergenceOptions,
    vocab_size: int,
    logits_memory: int,
    hard: bool,
    entropy: bool,
    needs: Needs,
) -> _LossAndGradients:
    """The loss times `scale`, its gradients times `expected`, and the fields of `DivergenceStats`."""
    stats = DivergenceStats.allocate(heads.hidden, heads.hidden.shape[0], hard, entropy)
    coefficient = scale * expected if token_weights is None else scale * expected * token_weights
    gradients = _run_chunks(heads, coefficient, options, vocab_size, logits_memory, stats, needs)
    losses = options.soft_weight * stats.soft
    if options.hard_weight != 0.0:
        losses = losses + options.hard_weight * stats.hard
    if token_weights is not None:
        losses = losses * token_weights
    return (losses.sum() * scale, *gradients, *stats)


@_linear_divergence.register_fake
def _(heads, token_weights, scale, expected, options, vocab_size, logits_memory, hard, entropy, needs):
    stats = DivergenceStats.allocate(heads.hidden, heads.hidden.shape[0], hard, entropy)
    return (stats.soft.new_empty(()), *HeadGradients(heads.hidden, heads.weight, heads.bias, needs, 0).results, *stats)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _LossAndGradients) -> None:
    _, _, _, expected, *_, ctx.needs = inputs
    _loss, d_hidden, d_weight, d_bias, *_ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(d_hidden, d_weight, d_bias, expected)


def _backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    *gradients, expected = ctx.saved_tensors
    gradients = list(where_needed(ctx.needs, *gradients))
    return input_gradients(ctx, *rescaled_gradients(gradients, grad, expected, _FUNCTIONS))


_linear_divergence.register_autograd(_backward, setup_context=_setup_context)


def reduced_divergence(
    student: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    teacher: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    labels: torch.Tensor | None,
    options: DivergenceOptions,
    vocab_size: int,
    reduction: str,
    num_items: int | torch.Tensor | None,
    token_weights: torch.Tensor | None,
    outputs: Sequence[str],
    logits_memory: int,
    expected_grad: float | torch.Tensor | None,
) -> torch.Tensor | DivergenceOutput:
    """The loss and outputs of any divergence; its public functions check the heads and call this.

    `student` holds hidden states, head and bias; `teacher` those of the teacher, or probabilities `(..., V)`, None and
    None. Only the first `vocab_size` classes are compared. The other arguments are those of `linear_jsd`; this raises
    its ValueErrors about them.
    """
    hidden, weight, bias = student
    if reduction not in ("mean", "sum"):
        raise ValueError(
            f"`reduction` is {reduction!r}; it must be 'mean' or 'sum' (see outputs=('token_divergence',))."
        )
    check_logits_memory(logits_memory)
    check_num_items(num_items)
    check_divergence_options(options, outputs)
    check_tokens("labels", labels, hidden, integer=True)
    check_tokens("token_weights", token_weights, hidden, integer=False)
    hard = options.hard_weight != 0.0 or "hard_loss" in outputs
    if hard and labels is None:
        raise ValueError("`hard_weight` or `outputs` asks for the cross entropy, which needs `labels`.")
    shape, dtype = hidden.shape[:-1], torch.promote_types(hidden.dtype, torch.float32)
    flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    target = teacher[0].detach().reshape(-1, teacher[0].shape[-1]).contiguous()
    labels = None if labels is None else labels.reshape(-1).contiguous()
    if token_weights is not None:
        token_weights = token_weights.detach().reshape(-1).to(dtype).contiguous()
    if labels is None and reduction == "mean" and num_items is None:
        num_items = flat.shape[0]
    counted = flat if labels is None else labels
    scale = inverse_normalizer(counted, options.ignore_index, reduction, num_items, dtype)
    needs = Needs.of(hidden, weight, bias)
    teacher_weight, teacher_bias = (None if tensor is None else tensor.detach() for tensor in teacher[1:])
    expected = expected_gradient(expected_grad, scale, hidden.dtype)
    loss, _, _, _, soft, nll, entropy = _linear_divergence(
        TwoHeads(flat, weight, bias, target, teacher_weight, teacher_bias, labels),
        *(token_weights, scale, expected, options, vocab_size, logits_memory, hard, "entropy" in outputs, needs),
    )
    if not outputs:
        return loss
    weights = scale if token_weights is None else scale * token_weights
    return DivergenceOutput(
        loss,
        soft_loss=(soft * weights).sum() if "soft_loss" in outputs else None,
        hard_loss=(nll * weights).sum() if "hard_loss" in outputs else None,
        entropy=entropy.view(shape) if "entropy" in outputs else None,
        token_divergence=soft.view(shape) if "token_divergence" in outputs else None,
    )


def reduced_divergence_reference(
    student, teacher, labels, options, vocab_size, reduction, num_items, token_weights, *_: Any
) -> torch.Tensor:
    """`reduced_divergence` in plain torch: all logits at once, without `outputs`."""
    heads = (student, teacher)
    logits = (states if weight is None else logits_reference(states, weight, bias) for states, weight, bias in heads)
    ours, theirs = (each[..., :vocab_size] for each in logits)
    return divergence_of_logits_reference(ours, theirs, labels, options, reduction, num_items, token_weights)
