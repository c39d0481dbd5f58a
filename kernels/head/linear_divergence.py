"""Distillation with both LM heads in one operator: the logits of the two models exist one chunk of tokens at a time.

For hidden states X `(N, H)` and head W `(V, H)` of the student and those of the teacher, which may have another hidden
size, and a divergence L of their logits (`_divergence_options`):

    for each chunk of tokens:   Z = X_c @ W.T,  T = X_teacher_c @ W_teacher.T     into two buffers, fp32
                                dZ = dL/dZ             over Z, in the dtype of X, one kernel (`_divergence_rows`)
                                dX_c = dZ @ W          dW += dZ.T @ X_c         dbias += sum of the rows of dZ, fp32

four matmuls, three for a frozen student head. The logits keep the matmul's fp32: where student and teacher nearly
agree, dZ is a difference of nearly equal numbers, and rounding the logits to half precision would put it off by several
percent. The gradients come with the forward, and the backward has only the upstream gradient to apply (`_rescale`), as
in `linear_cross_entropy`, with which this shares chunk plan and sums.

Bytes moved besides the matmuls' own, b bytes an element of X: at most N*V*(16 + b) for the row kernel (jsd 24 + b) and
2*V*H*b for each chunk after the first, to accumulate dW. Memory: two chunks of logits, dX, dW; saved for backward are
dX, dW and dbias.

The public functions are in `linear_jsd` and, for a teacher given as probabilities, `linear_kl_div`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.head.cross_entropy_options import compute_dtype, inverse_normalizer
from liger_trainer.kernels.head.divergence_options import (
    DivergenceOptions,
    DivergenceOutput,
    DivergenceStats,
    check_divergence_options,
)
from liger_trainer.kernels.head.divergence_rows import divergence_rows_, gradient_memory
from liger_trainer.kernels.head.head_chunks import COLUMN_MULTIPLE, Needs, allocate_gradients, chunk_rows, round_up
from liger_trainer.kernels.head.loss_checks import (
    check_labels_on_cpu,
    check_logits_memory,
    check_num_items,
    check_tokens,
)
from liger_trainer.kernels.head.matmul_precision import fp32_reductions
from liger_trainer.kernels.head.rescale import expected_gradient, rescaled_gradients
from liger_trainer.kernels.head.weight_gradient import WeightGradientSum, matmul_into, multiplies_into_fp32

_TENSORS = 10  # of the operator's arguments
_FUNCTIONS = "linear_jsd, linear_kl, linear_kl_div and linear_cosine_distance"


def _logits_dtype(hidden: torch.Tensor) -> torch.dtype:
    """That of the products with a head: fp32 where half precision is multiplied into it, else as `hidden` is."""
    return compute_dtype(hidden) if multiplies_into_fp32(hidden.device) else hidden.dtype


def _run_chunks(
    student: tuple[Any, ...],
    teacher: tuple[Any, ...],
    labels: torch.Tensor | None,
    coefficient: torch.Tensor,
    options: DivergenceOptions,
    vocab_size: int,
    logits_memory: int,
    stats: DivergenceStats,
    needs: Needs,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fills `stats` and returns dX, dW and dbias, empty where not needed."""
    hidden, weight, bias = student
    given, teacher_weight, teacher_bias = teacher  # hidden states, or without a head the probabilities themselves
    tokens = hidden.shape[0]
    if labels is not None and stats.hard.numel():
        check_labels_on_cpu(labels, vocab_size, options.ignore_index)
    d_hidden, d_weight, d_bias = allocate_gradients(hidden, weight, bias, needs)
    if tokens == 0:
        return d_hidden, d_weight.zero_(), d_bias.zero_()
    head = weight[:vocab_size]
    dtype, teacher_dtype = _logits_dtype(hidden), _logits_dtype(given)
    class_bytes = dtype.itemsize + (0 if teacher_weight is None else teacher_dtype.itemsize)
    rows = chunk_rows(hidden, head, logits_memory, needs.weight, class_bytes=class_bytes)
    width = round_up(vocab_size, COLUMN_MULTIPLE)
    buffer = hidden.new_empty(rows, width, dtype=dtype)
    gradient_buffer = gradient_memory(buffer, hidden.dtype, options.divergence)
    teacher_buffer = given.new_empty(rows if teacher_weight is not None else 0, width, dtype=teacher_dtype)
    weight_sum = WeightGradientSum(d_weight[:vocab_size], -(-tokens // rows)) if needs.weight else None
    bias_total = d_bias.new_zeros(min(d_bias.shape[0], vocab_size), dtype=compute_dtype(hidden))
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        part = hidden[start:stop]
        logits, gradient = (memory[: stop - start, :vocab_size] for memory in (buffer, gradient_buffer))
        matmul_into(logits, part, head.t())
        if teacher_weight is None:
            target, target_width = given[start:stop, :vocab_size], vocab_size
        else:
            target, target_width = teacher_buffer[: stop - start, :vocab_size], width
            matmul_into(target, given[start:stop], teacher_weight[:vocab_size].t())
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
        if needs.hidden:
            torch.mm(gradient, head, out=d_hidden[start:stop])
        if weight_sum is not None:
            weight_sum.add(gradient, part)
        if needs.bias:
            bias_total += gradient.sum(0, dtype=bias_total.dtype)
        del logits, gradient, target
    del buffer, gradient_buffer, teacher_buffer
    if weight_sum is not None:
        weight_sum.finish()
    d_weight[vocab_size:].zero_()
    d_bias[: bias_total.shape[0]].copy_(bias_total)
    d_bias[vocab_size:].zero_()
    return d_hidden, d_weight, d_bias


@torch.library.custom_op(
    "liger_trainer::linear_divergence",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher, Tensor? teacher_weight, Tensor? teacher_bias, "
    "Tensor? labels, Tensor? token_weights, Tensor scale, Tensor expected, str divergence, float beta, "
    "float temperature, float soft_weight, float hard_weight, float? student_softcap, float student_logit_scale, "
    "float? teacher_softcap, float teacher_logit_scale, float eps, int ignore_index, int vocab_size, "
    "int logits_memory, bool hard, bool entropy, bool hidden_gradient, bool weight_gradient, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _linear_divergence(*arguments: Any) -> Any:
    """The loss times `scale`, its gradients times `expected`, and the fields of `DivergenceStats`."""
    student, teacher, (labels, token_weights, scale, expected) = arguments[:3], arguments[3:6], arguments[6:_TENSORS]
    *fields, vocab_size, logits_memory, hard, entropy = arguments[_TENSORS:-3]
    options, needs = DivergenceOptions(*fields), Needs(*arguments[-3:])
    stats = DivergenceStats.allocate(student[0], student[0].shape[0], hard, entropy)
    coefficient = scale * expected if token_weights is None else scale * expected * token_weights
    with fp32_reductions(student[1][:vocab_size]):
        gradients = _run_chunks(student, teacher, labels, coefficient, options, vocab_size, logits_memory, stats, needs)
    losses = options.soft_weight * stats.soft
    if options.hard_weight != 0.0:
        losses = losses + options.hard_weight * stats.hard
    if token_weights is not None:
        losses = losses * token_weights
    return (losses.sum() * scale, *gradients, *stats)


@_linear_divergence.register_fake
def _(*arguments: Any) -> Any:
    hidden, weight, bias = arguments[:3]
    stats = DivergenceStats.allocate(hidden, hidden.shape[0], arguments[-5], arguments[-4])
    return (stats.soft.new_empty(()), *allocate_gradients(hidden, weight, bias, Needs(*arguments[-3:])), *stats)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:4], inputs[_TENSORS - 1])
    ctx.needs = inputs[-3:]
    ctx.missing = len(inputs) - 3


def _backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    gradients: list[torch.Tensor | None] = [None, None, None]
    if grad is not None:
        *saved, expected = ctx.saved_tensors
        gradients = [gradient if need else None for gradient, need in zip(saved, ctx.needs)]
        del saved
        gradients = rescaled_gradients(gradients, grad, expected, _FUNCTIONS)
    return (*gradients, *(None,) * ctx.missing)


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
    """The operator between its public functions and itself: flattening, normaliser, expected gradient and outputs.

    Args:
        student: Hidden states, head and bias, checked.
        teacher: Those of the teacher, or probabilities `(..., V)` and twice None; no gradient.
        labels: As in `linear_jsd`, like every argument that follows.
        options: The token loss.
        vocab_size: Classes that are compared.
        reduction: "mean" or "sum".
        num_items: Instead of the number of valid tokens.
        token_weights: Factors of the token losses.
        outputs: Names of the outputs.
        logits_memory: Bytes for the chunks.
        expected_grad: The upstream gradient to expect.

    Raises:
        ValueError: For any of the arguments after `teacher`.
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
        raise ValueError("The cross entropy is asked for (by `hard_weight` or `outputs`); it needs `labels`.")
    shape, dtype = hidden.shape[:-1], compute_dtype(hidden)
    flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    target = teacher[0].detach().reshape(-1, teacher[0].shape[-1]).contiguous()
    labels = None if labels is None else labels.reshape(-1).contiguous()
    if token_weights is not None:
        token_weights = token_weights.detach().reshape(-1).to(dtype).contiguous()
    normalised = reduction == "mean" or num_items is not None
    if labels is None and reduction == "mean" and num_items is None:
        num_items = flat.shape[0]
    counted = flat if labels is None else labels
    scale = inverse_normalizer(counted, options.ignore_index, reduction, num_items, dtype)
    enabled = torch.is_grad_enabled()
    needs = [enabled and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    loss, _, _, _, soft, nll, entropy = _linear_divergence(
        *(flat, weight, bias, target, *(None if tensor is None else tensor.detach() for tensor in teacher[1:])),
        *(labels, token_weights, scale, expected_gradient(expected_grad, scale, hidden.dtype, normalised)),
        *options,
        *(vocab_size, logits_memory, hard, "entropy" in outputs, *needs),
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
