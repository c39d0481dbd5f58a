"""LM head and cross entropy in one operator: the logits exist one chunk of tokens at a time.

For hidden states X `(N, H)`, head W `(V, H)` and a loss L of the logits ``X @ W.T + bias`` (`cross_entropy_kernel`):

    for each chunk of tokens:   Z = X_c @ W.T          into one buffer, rows padded to 64 columns
                                Z = dL/dZ              in place, one kernel
                                dX_c = Z @ W           dW += Z.T @ X_c          dbias += sum of the rows of Z, fp32

This is `_run_chunks`. The gradients are computed in the forward, in the three matmuls that are the minimum (two for a
frozen head or frozen hidden states), and the backward has only the upstream gradient to apply (`rescale`). The forward
needs the normaliser for that, which is counted on the device; nothing is synchronised. `reduction="none"` cannot know
its upstream gradient: it saves two fp32 numbers a token and recomputes the logits in the backward, one matmul more.

Bytes moved besides the matmuls' own, b bytes an element: 2 to 3 N*V*b for the row kernel and 2*V*H*b for each chunk
after the first, to accumulate dW. If the buffer holds few tokens, the first chunk is larger than the others and lies in
the memory that dW fills later (`large_first_chunk`). Memory: one chunk of logits, dX, dW. Saved for backward:
dX, dW and dbias.

Ignored tokens take no elementwise work, but their rows stay in the matmuls: to leave them out, the host has to know a
bound of their number, and reading it here would stall the device. A trainer knows one, and gives this operator the
labelled rows alone (`liger_trainer/head/labelled_rows.py`).

Shapes: N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_double_backward, where_needed
from liger_trainer.kernels.head.cross_entropy import (
    CrossEntropyOutput,
    cross_entropy_reference,
    reduced,
    with_outputs,
)
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels.head.head_chunks import (
    HeadGradients,
    Needs,
    chunk_rows,
    expected_gradient,
    logits_buffer,
    rescaled_gradients,
)
from liger_trainer.kernels.head.large_first_chunk import plan_panels, run_panels
from liger_trainer.kernels.head.loss_options import (
    LossOptions,
    check_linear,
    check_options,
    checked_class_weights,
    inverse_normalizer,
)
from liger_trainer.kernels.head.token_statistics import RowStats, check_labels_on_cpu
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast, fp32_reductions

_T = torch.Tensor
_Gradients = tuple[_T, _T, _T]  # dX, dW and dbias, empty if not needed
_Statistics = tuple[_T, _T, _T, _T, _T]  # the fields of `RowStats`
_LossAndGradients = tuple[_T, _T, _T, _T, _T, _T, _T, _T]  # the loss, `_Gradients`, all but the first of `_Statistics`


class HeadInputs(NamedTuple):
    """What the loss is computed from.

    Args:
        hidden: (N, H), contiguous.
        weight: (V, H).
        target: (N,).
        bias: (V,), or None.
        class_weights: (V,), or None.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    target: torch.Tensor
    bias: torch.Tensor | None
    class_weights: torch.Tensor | None = None


def _run_chunks(
    inputs: HeadInputs,
    options: LossOptions,
    logits_memory: int,
    stats: RowStats,
    coefficient: torch.Tensor | None,
    needs: Needs,
    recompute: bool,
) -> _Gradients:
    """Fills `stats`, or with `recompute` reads them, and returns dX, dW and dbias, empty if not needed.

    `coefficient` is the upstream gradient of the token losses, 0-d or `(N,)`; None if no gradient is needed.
    """
    hidden, weight, target, bias, class_weights = inputs
    check_labels_on_cpu(target, weight.shape[0], options.ignore_index)
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    rows = chunk_rows(hidden, weight, logits_memory, needs.weight_gradient)
    several = needs.weight_gradient and class_weights is None and tokens > rows
    panels = plan_panels(hidden, weight, rows) if several else None
    begin = 0 if panels is None else panels.tokens
    starts = range(begin, tokens, rows)
    gradients = HeadGradients(hidden, weight, bias, needs, len(starts) + (panels is not None))
    if tokens == 0:
        return gradients.finish()
    buffer = logits_buffer(hidden, weight, rows)
    with fp32_reductions(weight):
        if panels is not None:
            assert coefficient is not None
            found, first = stats.rows(0, begin), coefficient[:begin] if coefficient.dim() else coefficient
            run_panels(panels, target[:begin], bias, options, found, first, recompute, buffer, gradients)
        for start in starts:
            stop = min(start + rows, tokens)
            labels, found = target[start:stop], stats.rows(start, stop)
            factor = coefficient[start:stop] if coefficient is not None and coefficient.dim() else coefficient
            logits = torch.mm(hidden[start:stop], weight.t(), out=buffer[: stop - start, :vocab_size])
            if recompute:
                assert factor is not None
                row_gradient_(logits, labels, found, options, factor, bias, class_weights, width=buffer.shape[1])
            else:
                row_statistics_(logits, labels, found, options, bias, class_weights, factor, buffer.shape[1])
            gradients.add(start, stop, logits)  # which are their gradient by now, if one is needed
    return gradients.finish()


@operator("liger_trainer::linear_cross_entropy_forward")
def loss_and_gradients(
    inputs: HeadInputs,
    scale: torch.Tensor,
    expected: torch.Tensor,
    options: LossOptions,
    logits_memory: int,
    entropy: bool,
    predicted: bool,
    needs: Needs,
) -> _LossAndGradients:
    """The loss times `scale`, its gradients times `expected`, and nll, lse, entropy and predicted of `RowStats`."""
    stats = RowStats.allocate(inputs.hidden, inputs.target.numel(), entropy, predicted)
    coefficient = scale * expected
    gradients = _run_chunks(inputs, options, logits_memory, stats, coefficient, needs, recompute=False)
    return (stats.loss.sum() * scale, *gradients, *stats[1:])


@loss_and_gradients.register_fake
def _(inputs, scale, expected, options, logits_memory, entropy, predicted, needs):
    stats = RowStats.allocate(inputs.hidden, inputs.target.numel(), entropy, predicted)
    gradients = HeadGradients(inputs.hidden, inputs.weight, inputs.bias, needs, 0).results
    return (stats.loss.new_empty(()), *gradients, *stats[1:])


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: _LossAndGradients) -> None:
    _, _, expected, *_, ctx.needs = inputs
    _loss, d_hidden, d_weight, d_bias, *_ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(d_hidden, d_weight, d_bias, expected)


def _forward_backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    *gradients, expected = ctx.saved_tensors
    gradients = list(where_needed(ctx.needs, *gradients))
    d_hidden, d_weight, d_bias = rescaled_gradients(gradients, grad, expected, "linear_cross_entropy")
    return input_gradients(ctx, d_hidden, d_weight, None, d_bias)


loss_and_gradients.register_autograd(_forward_backward, setup_context=_forward_setup)


@operator("liger_trainer::linear_cross_entropy_rows")
def _rows(
    inputs: HeadInputs,
    options: LossOptions,
    logits_memory: int,
    entropy: bool,
    predicted: bool,
) -> _Statistics:
    """The `RowStats` of every token, without gradients."""
    needs = Needs(hidden_gradient=False, weight_gradient=False, bias_gradient=False)
    stats = RowStats.allocate(inputs.hidden, inputs.target.numel(), entropy, predicted)
    _run_chunks(inputs, options, logits_memory, stats, None, needs, recompute=False)
    return (*stats,)


@_rows.register_fake
def _(inputs, options, logits_memory, entropy, predicted):
    return (*RowStats.allocate(inputs.hidden, inputs.target.numel(), entropy, predicted),)


@operator("liger_trainer::linear_cross_entropy_rows_backward")
def _rows_backward(
    grad: torch.Tensor,
    inputs: HeadInputs,
    nll: torch.Tensor,
    lse: torch.Tensor,
    options: LossOptions,
    logits_memory: int,
    needs: Needs,
) -> _Gradients:
    """dX, dW and dbias for the upstream gradients `grad` of the token losses, from recomputed logits."""
    stats = RowStats.of_backward(nll, lse)
    return _run_chunks(inputs, options, logits_memory, stats, grad, needs, recompute=True)


@_rows_backward.register_fake
def _(grad, inputs, nll, lse, options, logits_memory, needs):
    return HeadGradients(inputs.hidden, inputs.weight, inputs.bias, needs, 0).results


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: _Statistics) -> None:
    head, ctx.options, ctx.logits_memory, _, _ = inputs
    _, nll, lse, _, _ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*head, nll, lse)


def _rows_autograd(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    refuse_double_backward("linear_cross_entropy")
    hidden_gradient, weight_gradient, _, bias_gradient, *_ = ctx.needs_input_grad
    needs = Needs(hidden_gradient, weight_gradient, bias_gradient)
    *head, nll, lse = ctx.saved_tensors
    gradients = _rows_backward(grad, HeadInputs(*head), nll, lse, ctx.options, ctx.logits_memory, needs)
    d_hidden, d_weight, d_bias = where_needed(needs, *gradients)
    return input_gradients(ctx, d_hidden, d_weight, None, d_bias)


_rows.register_autograd(_rows_autograd, setup_context=_rows_setup)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    class_weights: torch.Tensor | None = None,
    outputs: Sequence[str] = (),
    logits_memory: int = 512 * 2**20,
    expected_grad: float | torch.Tensor | None = None,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy of ``hidden @ weight.T + bias`` that never holds more than one chunk of the logits.

    Loss and options are those of `cross_entropy`. The logits are rounded to the dtype of `hidden`, as ``nn.Linear``
    rounds them; the loss is computed from them in fp32, and the gradients in the forward. Double backward is an error.
    (`linear_jsd`, whose gradient is a difference of two nearly equal distributions, keeps its logits in fp32.)

    Args:
        hidden: `(..., H)` of fp16, bf16, fp32 or float64.
        weight: `(V, H)` of the dtype of `hidden`. Under autocast hidden states, weight and bias of any dtype but
            float64 are cast to autocast's, as for ``nn.Linear``; a weight of another dtype is copied at each call.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the loss NaN.
        bias: `(V,)`, floating.
        ignore_index: Tokens with this label give no loss and no gradient.
        reduction: "mean" (over valid tokens; with class weights, as in torch, over their weights), "sum", or "none" (0
            at ignored tokens; the backward then recomputes the logits). If every token is ignored the loss is 0,
            with zero gradients.
        num_items: Divides the sum of the token losses by this instead, with "mean" and "sum"; a number or a 0-d tensor.
        label_smoothing: A number in [0, 1].
        z_loss: Factor of ``lse**2`` for each valid token; not weighted by class, and its mean is over the tokens.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap, more than 0.
        class_weights: `(V,)`, floating, not differentiated.
        outputs: Names among "z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll".
        logits_memory: Bytes for the chunk of logits, 512 MiB by default. Half-precision weight gradients of more than
            8 chunks are summed in fp32 (not on NVIDIA GPUs from Hopper on, which need no fp32 sum); if a larger buffer
            costs less memory than that sum, the buffer exceeds this.
        expected_grad: The upstream gradient to expect in the backward, a number or a 0-d tensor; default 1. If the
            upstream gradient is exactly that, the backward does not touch the gradients; otherwise it rescales them in
            one pass. Not used by reduction "none".

    Returns:
        The fp32 loss (float64 for float64 inputs), 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    hidden, weight, bias = as_autocast(hidden), as_autocast(weight), as_autocast(bias)
    check_linear(hidden, weight, target, bias, logits_memory)
    vocab_size = weight.shape[0]
    average = reduction == "mean" and num_items is None
    class_weights = checked_class_weights(class_weights, vocab_size, hidden, target, ignore_index, average)
    extras = ("entropy" in outputs, "predicted_tokens" in outputs or "token_accuracy" in outputs)
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    needs = Needs.of(hidden, weight, bias)
    if reduction == "none" or not any(needs):
        stats = RowStats(*_rows(HeadInputs(flat, weight, labels, bias, class_weights), options, logits_memory, *extras))
        return reduced(stats.loss, stats, target, options, reduction, num_items, outputs)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    scale = inverse_normalizer(labels, ignore_index, reduction, num_items, dtype)
    expected = expected_gradient(expected_grad, scale, hidden.dtype)
    loss, _, _, _, *tokens = loss_and_gradients(
        HeadInputs(flat, weight, labels, bias, class_weights), scale, expected, options, logits_memory, *extras, needs
    )
    return with_outputs(loss, outputs, RowStats(tokens[0], *tokens), target, options, scale)


def linear_cross_entropy_reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | CrossEntropyOutput:
    """`linear_cross_entropy` in plain torch: all logits at once, then `cross_entropy_reference` with its `options`."""
    return cross_entropy_reference(torch.nn.functional.linear(hidden, weight, bias), target, **options)
