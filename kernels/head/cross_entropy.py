"""Cross entropy on given logits (the formula is in `_cross_entropy_options`, the kernel in `_cross_entropy_rows`).

The forward reads the logits once and saves the logits themselves and two fp32 numbers a token, nll and lse. The
backward reads them again and writes the gradient, taking the upstream gradient of each token as it goes: any reduction,
any upstream gradient and `retain_graph` cost nothing more, and the caller's logits stay as they are.

Where the caller names the upstream gradient to expect, or lets the logits be overwritten, the forward makes the
gradient in the same launch, reading each row again while a part of it is in cache, and the backward only rescales it
where the upstream gradient is another one (`_rescale`).

Bytes moved for (N, V) logits of b bytes: N*V*b forward and 2*N*V*b backward, or 2 to 3 N*V*b in the forward alone.
Memory: the gradient, N*V*b, or none with `inplace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.head.cross_entropy_options import (
    OPTIONS_SCHEMA,
    CrossEntropyOutput,
    RowOptions,
    RowStats,
    check_options,
    checked_class_weights,
    compute_dtype,
    inverse_normalizer,
    with_outputs,
)
from liger_trainer.kernels.head.cross_entropy_reference import cross_entropy_reference
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_statistics_
from liger_trainer.kernels.head.logit_rows import row_view
from liger_trainer.kernels.head.loss_checks import check_labels_on_cpu, check_target
from liger_trainer.kernels.head.rescale import expected_gradient, rescaled_gradients
from liger_trainer.kernels.runtime import graph_is_kept, is_expanded, use_triton


@torch.library.custom_op(
    "liger_trainer::cross_entropy_forward",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, Tensor? class_weights, {OPTIONS_SCHEMA}, bool entropy, bool predicted, "
    "bool inplace) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(logits: torch.Tensor, target: torch.Tensor, class_weights: torch.Tensor | None, *rest: Any) -> Any:
    """Token losses and their statistics, each `(N,)` or empty; see `RowStats`."""
    *options, entropy, predicted, _ = rest
    stats = RowStats.allocate(logits, target.numel(), entropy, predicted)
    row_statistics_(logits, target, stats, RowOptions(*options), class_weights=class_weights)
    return tuple(stats)


@_forward.register_fake
def _(logits: torch.Tensor, target: torch.Tensor, class_weights: torch.Tensor | None, *rest: Any) -> Any:
    *_, entropy, predicted, _ = rest
    return tuple(RowStats.allocate(logits, target.numel(), entropy, predicted))


@torch.library.custom_op(
    "liger_trainer::cross_entropy_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor logits, Tensor target, Tensor nll, Tensor lse, Tensor? class_weights, "
    f"{OPTIONS_SCHEMA}) -> Tensor",
)
def _backward(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    nll: torch.Tensor,
    lse: torch.Tensor,
    class_weights: torch.Tensor | None,
    *options: Any,
) -> torch.Tensor:
    """The gradient of `logits`, contiguous, for the upstream gradients `grad` of the token losses."""
    stats = RowStats(lse, nll, lse, lse, lse)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    row_gradient_(logits, target, stats, RowOptions(*options), grad, class_weights=class_weights, out=out)
    return out


@_backward.register_fake
def _(grad: torch.Tensor, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op(
    "liger_trainer::cross_entropy_backward_",
    mutates_args={"logits"},
    schema="(Tensor grad, Tensor(a!) logits, Tensor target, Tensor nll, Tensor lse, Tensor? class_weights, "
    f"{OPTIONS_SCHEMA}) -> ()",
)
def _backward_(
    grad: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    nll: torch.Tensor,
    lse: torch.Tensor,
    class_weights: torch.Tensor | None,
    *options: Any,
) -> None:
    """As `_backward`, with the gradient written over `logits`."""
    stats = RowStats(lse, nll, lse, lse, lse)
    row_gradient_(logits, target, stats, RowOptions(*options), grad, class_weights=class_weights)


@_backward_.register_fake
def _(grad: torch.Tensor, logits: torch.Tensor, *rest: Any) -> None:
    return None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, target, class_weights, *options, _, _, inplace = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(logits, target, output[1], output[2], class_weights)
    ctx.options = options
    ctx.inplace = inplace


def _backward_of_forward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> tuple[torch.Tensor | None, ...]:
    missing = (None,) * 11
    if grad is None:
        return (None, *missing)
    refuse_double_backward("cross_entropy")
    logits, *saved = ctx.saved_tensors
    if not ctx.inplace or graph_is_kept():
        return (_backward(grad, logits, *saved, *ctx.options), *missing)
    # The version counter that this raises makes autograd refuse every later use of the logits by another backward.
    _backward_(grad, logits, *saved, *ctx.options)
    return (logits.detach(), *missing)


_forward.register_autograd(_backward_of_forward, setup_context=_setup_context)


@torch.library.custom_op(
    "liger_trainer::cross_entropy_gradient_",
    mutates_args={"gradient"},
    schema="(Tensor logits, Tensor(a!) gradient, Tensor target, Tensor? class_weights, Tensor coefficient, "
    f"{OPTIONS_SCHEMA}, bool entropy, bool predicted) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _gradient_(
    logits: torch.Tensor,
    gradient: torch.Tensor,
    target: torch.Tensor,
    class_weights: torch.Tensor | None,
    coefficient: torch.Tensor,
    *rest: Any,
) -> Any:
    """As `_forward`; `gradient`, which may be `logits`, becomes that of the summed losses times `coefficient`."""
    *options, entropy, predicted = rest
    stats = RowStats.allocate(logits, target.numel(), entropy, predicted)
    row_statistics_(
        logits, target, stats, RowOptions(*options), None, class_weights, coefficient=coefficient, out=gradient
    )
    return tuple(stats)


@_gradient_.register_fake
def _(logits: torch.Tensor, gradient: torch.Tensor, target: torch.Tensor, *rest: Any) -> Any:
    return tuple(RowStats.allocate(logits, target.numel(), rest[-2], rest[-1]))


@torch.library.custom_op(
    "liger_trainer::cross_entropy_reduce",
    mutates_args=(),
    schema="(Tensor logits, Tensor gradient, Tensor losses, Tensor scale, Tensor expected) -> Tensor",
)
def _reduce(
    logits: torch.Tensor, gradient: torch.Tensor, losses: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor
) -> Any:
    """The sum of `losses` times `scale`; the gradient of `logits` is `gradient`, made for the upstream `expected`."""
    return losses.sum() * scale


@_reduce.register_fake
def _(
    logits: torch.Tensor, gradient: torch.Tensor, losses: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor
) -> Any:
    return losses.new_empty(())


def _reduce_setup(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[1], inputs[4])


def _reduce_backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    gradient = None
    if grad is not None:
        saved, expected = ctx.saved_tensors
        (gradient,) = rescaled_gradients([saved], grad, expected, "cross_entropy")
    return (gradient, None, None, None, None)


_reduce.register_autograd(_reduce_backward, setup_context=_reduce_setup)


def _may_overwrite(logits: torch.Tensor) -> bool:
    base = logits if logits._base is None else logits._base
    return not base.is_leaf and not is_expanded(logits)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
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
    inplace: bool = False,
    expected_grad: float | torch.Tensor | None = None,
) -> torch.Tensor | CrossEntropyOutput:
    """Cross entropy of logits and class ids, as ``torch.nn.functional.cross_entropy`` with the options of LM training.

    The logits are transformed to ``z = softcap * tanh(x * logit_scale / softcap) / temperature`` (without `softcap`:
    ``x * logit_scale / temperature``), the statistics of a token taken from z in fp32, and its loss is
    ``(1 - label_smoothing) * w[t] * (lse - z[t]) + label_smoothing / V * sum_c w[c] * (lse - z[c]) + z_loss * lse**2``
    (smoothing and class weights as in torch; z-loss as in PaLM, arXiv 2204.02311).

    Args:
        logits: `(..., V)` of fp16, bf16 or fp32 (float64 runs the reference); never overwritten unless
            `inplace` says so.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the loss NaN.
        ignore_index: Tokens with this label give no loss and no gradient, and their logits are not read.
        reduction: "mean" (over valid tokens; with class weights, as in torch, over their weights), "sum", or "none" (0
            at ignored tokens). Where every token is ignored the loss is 0, with zero gradients.
        num_items: Divides the sum of the token losses by this instead, with "mean" and "sum"; a number or a 0-d tensor.
        label_smoothing: In [0, 1].
        z_loss: Factor of ``lse**2`` for each valid token; not weighted by class, and its mean is over the tokens.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap, more than 0.
        class_weights: `(V,)`, floating, not differentiated.
        outputs: Names among "z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll".
        inplace: Writes the gradient over `logits`, saving their size in memory: with "mean" and "sum" in the forward,
            otherwise in the last backward (reduction "none"; logits with gaps between their rows). The logits must
            then be of no further use: who reads them finds the gradient, and the backward of another operation which
            needs them raises autograd's error about an in-place change. ``retain_graph=True`` stays right. Nothing is
            written where no gradient is needed. Leaves of autograd and views of them, expanded logits, compiled graphs
            and the reference path ignore it.
        expected_grad: The upstream gradient to expect in the backward, a number or a 0-d tensor. By default none is
            expected, and the backward makes the gradient, whatever comes (`inplace` expects 1). With one, the forward
            makes it; where the upstream gradient comes exactly so, the backward does not touch it, otherwise it passes
            over it once. Not used by reduction "none", nor on the reference path.

    Returns:
        The fp32 loss (float64 for float64 logits), 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``, except on the reference path.
    """
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    if logits.dim() < 1 or not logits.is_floating_point():
        raise ValueError(f"`logits` has shape {tuple(logits.shape)} and dtype {logits.dtype}; give floats of (..., V).")
    vocab_size = logits.shape[-1]
    check_target(target, logits.shape[:-1], vocab_size, logits, "logits")
    check_labels_on_cpu(target, vocab_size, ignore_index)
    if not use_triton(logits):
        return cross_entropy_reference(
            logits,
            target,
            ignore_index,
            reduction,
            num_items,
            label_smoothing,
            z_loss,
            softcap,
            logit_scale,
            temperature,
            class_weights,
            outputs,
        )
    average = reduction == "mean" and num_items is None
    class_weights = checked_class_weights(class_weights, vocab_size, logits, target, ignore_index, average)
    rows, labels = row_view(logits), target.reshape(-1).contiguous()
    extras = ("entropy" in outputs, "predicted_tokens" in outputs or "token_accuracy" in outputs)
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    inplace = inplace and needs_gradient and not torch.compiler.is_compiling() and _may_overwrite(logits)
    scale = None
    if reduction != "none":
        scale = inverse_normalizer(target, ignore_index, reduction, num_items, compute_dtype(logits))
    if scale is None or not needs_gradient or not (rows.is_contiguous() if inplace else expected_grad is not None):
        stats = RowStats(*_forward(rows, labels, class_weights, *options, *extras, inplace))
        loss = stats.loss.view(target.shape) if scale is None else stats.loss.sum() * scale
        return with_outputs(loss, outputs, stats, target, options, scale)
    expected = expected_gradient(expected_grad, scale, logits.dtype, reduction == "mean" or num_items is not None)
    data = rows.detach()
    gradient = data if inplace else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    stats = RowStats(*_gradient_(data, gradient, labels, class_weights, scale * expected, *options, *extras))
    loss = _reduce(rows, gradient, stats.loss, scale, expected)
    return with_outputs(loss, outputs, stats, target, options, scale)
