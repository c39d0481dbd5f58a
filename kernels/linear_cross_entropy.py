"""LM head and cross entropy in one operator: the logits exist one chunk of tokens at a time.

For hidden states X `(N, H)`, head W `(V, H)` and a loss L of the logits ``X @ W.T + bias`` (`cross_entropy_options`):

    for each chunk of tokens:   Z = X_c @ W.T          into one buffer, rows padded to 64 columns
                                Z = dL/dZ              in place, one kernel (`cross_entropy_rows`)
                                dX_c = Z @ W           dW += Z.T @ X_c          dbias += sum of the rows of Z, fp32

so the gradients come with the forward, in the three matmuls that are the least possible (two for a frozen head or frozen
hidden states), and the backward has only the upstream gradient to apply (`rescale`). The forward needs the normaliser
for that, which is counted on the device; nothing is synchronised. `reduction="none"` cannot know its upstream gradient:
it keeps two fp32 numbers a token and recomputes the logits in the backward, one matmul more.

Bytes moved besides the matmuls' own, b bytes an element: 2 to 3 N*V*b for the row kernel and 2*V*H*b for each chunk after
the first, to accumulate dW. Memory: one chunk of logits, dX, dW; saved for backward are dX, dW and dbias.

Ignored tokens take no elementwise work, but their rows stay in the matmuls: leaving them out takes their count on the
host, and learning it there would stall the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.cross_entropy_options import (
    CrossEntropyOutput,
    RowOptions,
    RowStats,
    check_labels_on_cpu,
    check_linear,
    check_options,
    checked_class_weights,
    compute_dtype,
    inverse_normalizer,
    with_outputs,
)
from liger_trainer.kernels.cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels.rescale import refuse_double_backward, rescaled_gradients

_COLUMN_MULTIPLE = 64  # of the buffer's rows: matmuls lose their fast path on odd strides
_ROW_MULTIPLE = 128  # of a chunk: a matmul tile
_MAX_HALF_CHUNKS = 8  # dW sums of fp16 or bf16 chunks keep within the error of one big matmul up to here
_FP16_EXPECTED_GRAD = 4096.0
_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float? softcap, float logit_scale, float temperature"


class _Needs(NamedTuple):
    """Which gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _chunk_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, weight_gradient: bool) -> int:
    """Tokens of a chunk: as many as `logits_memory` bytes hold, spread evenly over the chunks.

    The budget is exceeded in one case: where it would take a half-precision dW over `_MAX_HALF_CHUNKS` chunks, and so
    into an fp32 accumulator of V*H more elements' worth of memory, the buffer grows instead while that costs less.
    """
    tokens, hidden_size = hidden.shape
    rows = max(1, logits_memory // (_round_up(weight.shape[0], _COLUMN_MULTIPLE) * hidden.element_size()))
    if rows >= _ROW_MULTIPLE:
        rows -= rows % _ROW_MULTIPLE
    if weight_gradient and hidden.element_size() == 2:
        few = -(-tokens // _MAX_HALF_CHUNKS)
        few = _round_up(few, _ROW_MULTIPLE) if few >= _ROW_MULTIPLE else few
        if rows < few <= rows + hidden_size:
            rows = few
    chunks = -(-tokens // rows)
    even = -(-tokens // max(chunks, 1))
    return max(1, min(rows, _round_up(even, _ROW_MULTIPLE)))


def _accumulation_dtype(chunks: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which dW is summed over `chunks` chunks.

    A half-precision sum of c chunks rounds c times, an error of about sqrt((c + 1) / 2) roundings of the result: up to
    8 chunks that stays below what the rounding of the logits has already cost; beyond it the sum is fp32.
    """
    return torch.float32 if chunks > _MAX_HALF_CHUNKS and dtype.itemsize == 2 else dtype


def _accumulate_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    """``total = left @ right`` for the first chunk, ``total += left @ right`` for the others; `total` may be fp32."""
    if total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            torch.addmm(total, left, right, out=total)
    elif total.device.type == "cuda" and torch.version.hip is None:
        if first:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif first:
        total.copy_(torch.mm(left, right))
    else:
        total.add_(torch.mm(left, right))


def _run_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    options: RowOptions,
    logits_memory: int,
    stats: RowStats,
    coefficient: torch.Tensor | None,
    needs: _Needs,
    recompute: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fills `stats`, or with `recompute` reads them, and returns dX, dW and dbias, empty where not needed."""
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    check_labels_on_cpu(target, vocab_size, options.ignore_index)
    d_hidden, d_weight, d_bias = _allocate_gradients(hidden, weight, bias, needs)
    if tokens == 0:
        return d_hidden, d_weight.zero_(), d_bias.zero_()
    rows = _chunk_rows(hidden, weight, logits_memory, needs.weight)
    width = _round_up(vocab_size, _COLUMN_MULTIPLE)
    buffer = hidden.new_empty(rows, width)
    total_dtype = _accumulation_dtype(-(-tokens // rows), weight.dtype)
    total = d_weight if total_dtype == weight.dtype else torch.empty_like(d_weight, dtype=total_dtype)
    bias_total = d_bias.new_zeros(d_bias.shape, dtype=compute_dtype(hidden))
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        part, labels, part_stats = hidden[start:stop], target[start:stop], stats.rows(start, stop)
        logits = torch.mm(part, weight.t(), out=buffer[: stop - start, :vocab_size])
        upstream = coefficient[start:stop] if coefficient is not None and coefficient.dim() else coefficient
        if recompute:
            assert upstream is not None
            row_gradient_(logits, labels, part_stats, options, upstream, bias, class_weights, width=width)
        else:
            row_statistics_(logits, labels, part_stats, options, bias, class_weights, upstream, width)
        if needs.hidden:
            torch.mm(logits, weight, out=d_hidden[start:stop])
        if needs.weight:
            _accumulate_(total, logits.t(), part, first=start == 0)
        if needs.bias:
            bias_total += logits.sum(0, dtype=bias_total.dtype)
        del logits
    del buffer  # before the rounded copy of an fp32 dW is made
    return d_hidden, d_weight if total is d_weight else d_weight.copy_(total), d_bias.copy_(bias_total)


def _allocate_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: _Needs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised dX, dW and dbias with the strides autograd wants to adopt them; empty where not needed."""
    return (
        torch.empty_like(hidden) if needs.hidden else hidden.new_empty(0),
        torch.empty_like(weight) if needs.weight else weight.new_empty(0),
        torch.empty_like(bias) if needs.bias and bias is not None else weight.new_empty(0),
    )


@torch.library.custom_op(
    "liger_trainer::linear_cross_entropy_forward",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weights, Tensor scale, "
    f"Tensor expected, {_OPTIONS}, int logits_memory, bool entropy, bool predicted, bool hidden_gradient, "
    "bool weight_gradient, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    scale: torch.Tensor,
    expected: torch.Tensor,
    *rest: Any,
) -> Any:
    """The loss times `scale`, its gradients times `expected`, and nll, lse, entropy and predicted of `RowStats`."""
    *options, logits_memory, entropy, predicted, hidden_gradient, weight_gradient, bias_gradient = rest
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    gradients = _run_chunks(
        hidden,
        weight,
        target,
        bias,
        class_weights,
        RowOptions(*options),
        logits_memory,
        stats,
        scale * expected,
        _Needs(hidden_gradient, weight_gradient, bias_gradient),
        recompute=False,
    )
    return (stats.loss.sum() * scale, *gradients, *stats[1:])


@_forward.register_fake
def _(hidden: Any, weight: Any, target: Any, bias: Any, class_weights: Any, scale: Any, *rest: Any) -> Any:
    *_, entropy, predicted, hidden_gradient, weight_gradient, bias_gradient = rest
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    needs = _Needs(hidden_gradient, weight_gradient, bias_gradient)
    return (stats.loss.new_empty(()), *_allocate_gradients(hidden, weight, bias, needs), *stats[1:])


def _forward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:4], inputs[6])
    ctx.needs = inputs[-3:]


def _forward_backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    d_hidden = d_weight = d_bias = None
    if grad is not None:
        *saved, expected = ctx.saved_tensors
        gradients = [gradient if need else None for gradient, need in zip(saved, ctx.needs)]
        del saved
        d_hidden, d_weight, d_bias = rescaled_gradients(gradients, grad, expected)
    return (d_hidden, d_weight, None, d_bias, *(None,) * 15)


_forward.register_autograd(_forward_backward, setup_context=_forward_setup)


@torch.library.custom_op(
    "liger_trainer::linear_cross_entropy_rows",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weights, {_OPTIONS}, "
    "int logits_memory, bool entropy, bool predicted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    *rest: Any,
) -> Any:
    """The `RowStats` of every token, without gradients."""
    *options, logits_memory, entropy, predicted = rest
    stats = RowStats.allocate(hidden, target.numel(), entropy, predicted)
    _run_chunks(
        hidden,
        weight,
        target,
        bias,
        class_weights,
        RowOptions(*options),
        logits_memory,
        stats,
        None,
        _Needs(False, False, False),
        recompute=False,
    )
    return tuple(stats)


@_rows.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *rest: Any) -> Any:
    return tuple(RowStats.allocate(hidden, target.numel(), rest[-2], rest[-1]))


@torch.library.custom_op(
    "liger_trainer::linear_cross_entropy_rows_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weights, Tensor nll, "
    f"Tensor lse, {_OPTIONS}, int logits_memory, bool hidden_gradient, bool weight_gradient, bool bias_gradient) "
    "-> (Tensor, Tensor, Tensor)",
)
def _rows_backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    nll: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> Any:
    """dX, dW and dbias for the upstream gradients `grad` of the token losses, from recomputed logits."""
    *options, logits_memory, hidden_gradient, weight_gradient, bias_gradient = rest
    return _run_chunks(
        hidden,
        weight,
        target,
        bias,
        class_weights,
        RowOptions(*options),
        logits_memory,
        RowStats(lse, nll, lse, lse, lse),
        grad,
        _Needs(hidden_gradient, weight_gradient, bias_gradient),
        recompute=True,
    )


@_rows_backward.register_fake
def _(grad: Any, hidden: Any, weight: Any, target: Any, bias: Any, *rest: Any) -> Any:
    return _allocate_gradients(hidden, weight, bias, _Needs(*rest[-3:]))


def _rows_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*inputs[:5], output[1], output[2])
    ctx.options = inputs[5:-2]


def _rows_autograd(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    gradients: list[torch.Tensor | None] = [None, None, None]
    if grad is not None:
        refuse_double_backward()
        needs = _Needs(ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3])
        computed = _rows_backward(grad, *ctx.saved_tensors, *ctx.options, *needs)
        gradients = [gradient if need else None for gradient, need in zip(computed, needs)]
    return (gradients[0], gradients[1], None, gradients[2], *(None,) * 10)


_rows.register_autograd(_rows_autograd, setup_context=_rows_setup)


@torch.no_grad()
def _expected_gradient(
    expected_grad: float | torch.Tensor | None, scale: torch.Tensor, dtype: torch.dtype, normalised: bool
) -> torch.Tensor:
    """`expected_grad` as a 0-d tensor beside `scale`, with 1 where it could not be divided out again.

    fp16 gradients of a mean lie below fp16's range; unless told otherwise they are kept times a power of two, as a
    gradient scaler would have them. A sum needs no such help and might overflow with it.
    """
    if expected_grad is None:
        expected_grad = _FP16_EXPECTED_GRAD if dtype == torch.float16 and normalised else 1.0
    expected = torch.ones_like(scale) * expected_grad
    return torch.where(torch.isfinite(expected) & (expected != 0), expected, 1.0)


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
    rounds them, the loss computed from them in fp32 and the gradients in the forward; double backward is an error.

    Args:
        hidden: `(..., H)` of fp16, bf16, fp32 or float64.
        weight: `(V, H)` of the dtype of `hidden`.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the loss NaN.
        bias: `(V,)`, floating.
        ignore_index: Tokens with this label give no loss and no gradient.
        reduction: "mean" (over valid tokens, or over their class weights), "sum", or "none" (0 at ignored tokens; the
            backward then recomputes the logits). Where every token is ignored the loss is 0, with zero gradients.
        num_items: Divides the sum of the token losses by this instead, with "mean" and "sum"; a number or a 0-d tensor.
        label_smoothing: In [0, 1].
        z_loss: Factor of ``lse**2`` for each valid token; not weighted by class.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap, more than 0.
        class_weights: `(V,)`, floating, not differentiated.
        outputs: Names among "z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll".
        logits_memory: Bytes for the chunk of logits, 512 MiB by default. More than 8 chunks would take an fp32 sum of
            the weight gradients; where a bigger buffer is cheaper than that sum, the buffer exceeds this.
        expected_grad: The upstream gradient to expect in the backward, a number or a 0-d tensor; default 1. Where it
            comes exactly so, the backward does not touch the gradients; otherwise it passes over them once. Not used
            by reduction "none".

    Returns:
        The fp32 loss (float64 for float64 inputs), 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``.
    """
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    check_linear(hidden, weight, target, bias, logits_memory)
    vocab_size, dtype = weight.shape[0], compute_dtype(hidden)
    class_weights = checked_class_weights(class_weights, vocab_size, hidden)
    extras = ("entropy" in outputs, "predicted_tokens" in outputs or "token_accuracy" in outputs)
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    grad_enabled = torch.is_grad_enabled()
    needs = [
        grad_enabled and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)
    ]
    scale = None
    if reduction != "none":
        scale = inverse_normalizer(labels, vocab_size, ignore_index, reduction, num_items, class_weights, dtype)
    if scale is None or not any(needs):
        stats = RowStats(*_rows(flat, weight, labels, bias, class_weights, *options, logits_memory, *extras))
        loss = stats.loss.view(target.shape) if scale is None else stats.loss.sum() * scale
        return with_outputs(loss, outputs, stats, target, options, scale)
    normalised = reduction == "mean" or num_items is not None
    expected = _expected_gradient(expected_grad, scale, hidden.dtype, normalised)
    loss, _, _, _, *tokens = _forward(
        flat, weight, labels, bias, class_weights, scale, expected, *options, logits_memory, *extras, *needs
    )
    return with_outputs(loss, outputs, RowStats(tokens[0], *tokens), target, options, scale)
