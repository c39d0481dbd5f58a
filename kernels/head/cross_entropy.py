"""Cross entropy of given logits (formula and kernel: `cross_entropy_kernel.py`).

The forward reads the logits once and saves the logits themselves and two fp32 numbers a token, nll and lse. The
backward reads them again and writes the gradient, multiplied by each token's upstream gradient: so every reduction,
every upstream gradient and `retain_graph` cost the same, and the caller's logits are not changed.

If the caller names the upstream gradient to expect, or lets the logits be overwritten, the forward computes the
gradient in the same launch, reading each row again while part of it is in cache. The backward then only rescales the
gradient, and only if the upstream gradient is another one (`rescale`).

Bytes moved for (N, V) logits of b bytes: N*V*b forward and 2*N*V*b backward, or 2 to 3 N*V*b in the forward alone.
Memory: the gradient, N*V*b, or none with `inplace`.

Shapes: N tokens, V vocabulary; logits (N, V), or (B, S, V) of B sequences of S tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_double_backward
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_statistics_, transformed_logits
from liger_trainer.kernels.head.head_chunks import expected_gradient, rescaled_gradients
from liger_trainer.kernels.head.logit_rows import row_view
from liger_trainer.kernels.head.loss_options import (
    LossOptions,
    check_logits,
    check_options,
    checked_class_weights,
    inverse_normalizer,
)
from liger_trainer.kernels.head.token_statistics import RowStats, Shard, check_labels_on_cpu
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import graph_is_kept, is_expanded, reference_of, use_triton

_Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # the fields of `RowStats`


@operator("liger_trainer::logits_gradient")
def logits_gradient(
    grad: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    logits: torch.Tensor,
    target: torch.Tensor,
    nll: torch.Tensor,
    lse: torch.Tensor,
    entropy: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    options: LossOptions,
    shard: Shard,
) -> torch.Tensor:
    """The gradient of `logits`, contiguous, for upstream gradients of the token losses and of the entropies.

    Every loss of given logits that takes labels computes it in the backward by this operator.

    The logits are the columns from `vocab_start` on of a vocabulary of `vocab_size` ids; `nll`, `lse` and `entropy`,
    each `(N,)`, are those of the whole vocabulary. `entropy` is read only if there is a `grad_entropy`.
    """
    stats = RowStats.of_backward(nll, lse, entropy)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    row_gradient_(
        logits, target, stats, options, grad, None, class_weights, out, entropy_coefficient=grad_entropy, shard=shard
    )
    return out


@operator("liger_trainer::cross_entropy_forward")
def _forward(
    logits: torch.Tensor,
    target: torch.Tensor,
    class_weights: torch.Tensor | None,
    options: LossOptions,
    entropy: bool,
    predicted: bool,
    inplace: bool,
) -> _Statistics:
    """The `RowStats` of every token. `inplace` is for the backward, which may then overwrite `logits`."""
    stats = RowStats.allocate(logits, target.numel(), entropy, predicted)
    row_statistics_(logits, target, stats, options, class_weights=class_weights)
    return (*stats,)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Statistics) -> None:
    logits, target, class_weights, ctx.options, _, _, ctx.inplace = inputs
    _, nll, lse, _, _ = output
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(logits, target, nll, lse, class_weights)


def _backward_of_forward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
    refuse_double_backward("cross_entropy")
    logits, target, nll, lse, class_weights = ctx.saved_tensors
    if not ctx.inplace or graph_is_kept():
        gradient = logits_gradient(
            grad, None, logits, target, nll, lse, None, class_weights, ctx.options, Shard(0, logits.shape[-1])
        )
        return input_gradients(ctx, gradient)
    stats = RowStats.of_backward(nll, lse)
    row_gradient_(logits, target, stats, ctx.options, grad, class_weights=class_weights)
    # From here on autograd refuses every use of these logits by another backward.
    torch.autograd.graph.increment_version(logits)
    return input_gradients(ctx, logits.detach())


_forward.register_autograd(_backward_of_forward, setup_context=_setup_context)


@operator("liger_trainer::cross_entropy_gradient_", mutates=("gradient",))
def _gradient_(
    logits: torch.Tensor,
    gradient: torch.Tensor,
    target: torch.Tensor,
    class_weights: torch.Tensor | None,
    coefficient: torch.Tensor,
    options: LossOptions,
    entropy: bool,
    predicted: bool,
) -> _Statistics:
    """As `_forward`; `gradient`, which may be `logits`, becomes that of the summed losses times `coefficient`."""
    stats = RowStats.allocate(logits, target.numel(), entropy, predicted)
    row_statistics_(logits, target, stats, options, None, class_weights, coefficient=coefficient, out=gradient)
    return (*stats,)


@operator("liger_trainer::cross_entropy_reduce")
def _reduce(
    logits: torch.Tensor, gradient: torch.Tensor, losses: torch.Tensor, scale: torch.Tensor, expected: torch.Tensor
) -> torch.Tensor:
    """The sum of `losses` times `scale`; `gradient` is that of `logits` for the upstream gradient `expected`."""
    return losses.sum() * scale


def _reduce_setup(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    _, gradient, _, _, expected = inputs
    ctx.save_for_backward(gradient, expected)


def _reduce_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    gradient, expected = ctx.saved_tensors
    return input_gradients(ctx, *rescaled_gradients([gradient], grad, expected, "cross_entropy"))


_reduce.register_autograd(_reduce_backward, setup_context=_reduce_setup)


@dataclasses.dataclass
class CrossEntropyOutput:
    """The loss and the outputs that were asked for; the others are None. Only `loss` has a gradient.

    Attributes:
        loss: fp32, 0-d, or per token with reduction "none".
        z_loss: The z-loss that is part of `loss`, fp32, shaped as `loss`.
        token_accuracy: fp32 0-d, the share of valid tokens whose label is the most likely one.
        predicted_tokens: int64 per token, the most likely id (the lowest of equals); -1 at ignored tokens.
        entropy: fp32 per token, of the distribution after soft-cap, scale and temperature; 0 at ignored tokens.
        token_nll: fp32 per token, lse - z[target]; 0 at ignored tokens.
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    token_nll: torch.Tensor | None = None


@torch.no_grad()
def with_outputs(
    loss: torch.Tensor,
    outputs: Sequence[str],
    stats: RowStats,
    target: torch.Tensor,
    options: LossOptions,
    scale: torch.Tensor | None,
) -> torch.Tensor | CrossEntropyOutput:
    """`loss` alone, or with the requested `outputs`; `scale` is the inverse normaliser, None for reduction "none"."""
    if not outputs:
        return loss
    result = CrossEntropyOutput(loss)
    if "z_loss" in outputs:
        rows = options.z_loss * stats.lse.detach().square()
        result.z_loss = rows.view(target.shape) if scale is None else rows.sum() * scale
    if "token_accuracy" in outputs:
        valid = target.reshape(-1) != options.ignore_index
        correct = valid & (stats.predicted == target.reshape(-1))
        result.token_accuracy = correct.sum().to(stats.nll.dtype) / valid.sum().clamp(min=1)
    if "predicted_tokens" in outputs:
        result.predicted_tokens = stats.predicted.view(target.shape)
    if "entropy" in outputs:
        result.entropy = stats.entropy.detach().view(target.shape)
    if "token_nll" in outputs:
        result.token_nll = stats.nll.detach().view(target.shape)
    return result


def reduced(
    losses: torch.Tensor,
    stats: RowStats,
    target: torch.Tensor,
    options: LossOptions,
    reduction: str,
    num_items: int | torch.Tensor | None,
    outputs: Sequence[str],
) -> torch.Tensor | CrossEntropyOutput:
    """The token `losses` `(N,)` reduced, alone or with the requested `outputs`."""
    if reduction == "none":
        return with_outputs(losses.view(target.shape), outputs, stats, target, options, None)
    scale = inverse_normalizer(target, options.ignore_index, reduction, num_items, losses.dtype)
    return with_outputs(losses.sum() * scale, outputs, stats, target, options, scale)


def _may_overwrite(logits: torch.Tensor) -> bool:
    """Whether the memory of `logits` belongs to them alone: not to a leaf of autograd, and not expanded."""
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
    ``x * logit_scale / temperature``). The statistics of a token are computed from z in fp32, and its loss is
    ``(1 - label_smoothing) * w[t] * (lse - z[t]) + label_smoothing / V * sum_c w[c] * (lse - z[c]) + z_loss * lse**2``
    (smoothing and class weights as in torch; z-loss as in PaLM, arXiv 2204.02311).

    Args:
        logits: `(..., V)` of fp16, bf16 or fp32 (float64 runs the reference); never overwritten unless
            `inplace` says so.
        target: `(...)` of int64 or int32. On the CPU a label outside [0, V) is an error; on an accelerator, where
            looking at it would stall the device, it makes the loss NaN.
        ignore_index: Tokens with this label give no loss and no gradient, and their logits are not read.
        reduction: "mean" (over valid tokens; with class weights, as in torch, over their weights), "sum", or "none" (0
            at ignored tokens). If every token is ignored the loss is 0, with zero gradients.
        num_items: Divides the sum of the token losses by this instead, with "mean" and "sum"; a number or a 0-d tensor.
        label_smoothing: A number in [0, 1].
        z_loss: Factor of ``lse**2`` for each valid token; not weighted by class, and its mean is over the tokens.
        softcap: Soft-cap of the logits, more than 0.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap, more than 0.
        class_weights: `(V,)`, floating, not differentiated.
        outputs: Names among "z_loss", "token_accuracy", "predicted_tokens", "entropy", "token_nll".
        inplace: Writes the gradient over `logits`, which saves their size in memory: in the forward with "mean" and
            "sum", otherwise in the last backward (reduction "none"; logits with gaps between their rows). The logits
            must not be used afterwards: they hold the gradient, and the backward of another operation that needs them
            raises autograd's error about an in-place change. ``retain_graph=True`` stays right. Nothing is written if
            no gradient is needed. Leaves of autograd and views of them, expanded logits, compiled graphs and the
            reference path ignore it.
        expected_grad: The upstream gradient to expect in the backward, a number or a 0-d tensor. By default none is
            expected, and the backward computes the gradient (`inplace` expects 1). With one, the forward computes it;
            if the upstream gradient is exactly that, the backward does not touch it, otherwise it rescales it in one
            pass. Not used by reduction "none", nor on the reference path.

    Returns:
        The fp32 loss (float64 for float64 logits), 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
        RuntimeError: In a backward with ``create_graph=True``, except on the reference path.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    check_logits(logits, target)
    vocab_size = logits.shape[-1]
    check_labels_on_cpu(target, vocab_size, ignore_index)
    average = reduction == "mean" and num_items is None
    class_weights = checked_class_weights(class_weights, vocab_size, logits, target, ignore_index, average)
    if not use_triton(logits):
        stats = _row_statistics(logits.reshape(-1, vocab_size), target.reshape(-1), options, class_weights)
        return reduced(stats.loss, stats, target, options, reduction, num_items, outputs)
    rows, labels = row_view(logits), target.reshape(-1).contiguous()
    extras = ("entropy" in outputs, "predicted_tokens" in outputs or "token_accuracy" in outputs)
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    inplace = inplace and needs_gradient and not torch.compiler.is_compiling() and _may_overwrite(logits)
    in_forward = needs_gradient and (rows.is_contiguous() if inplace else expected_grad is not None)
    if reduction == "none" or not in_forward:
        stats = RowStats(*_forward(rows, labels, class_weights, options, *extras, inplace))
        return reduced(stats.loss, stats, target, options, reduction, num_items, outputs)
    dtype = torch.promote_types(logits.dtype, torch.float32)
    scale = inverse_normalizer(target, ignore_index, reduction, num_items, dtype)
    expected = expected_gradient(expected_grad, scale, logits.dtype)
    data = rows.detach()
    gradient = data if inplace else torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    stats = RowStats(*_gradient_(data, gradient, labels, class_weights, scale * expected, options, *extras))
    loss = _reduce(rows, gradient, stats.loss, scale, expected)
    return with_outputs(loss, outputs, stats, target, options, scale)


cross_entropy_reference = reference_of(cross_entropy, "use_triton")


def _row_statistics(
    logits: torch.Tensor, target: torch.Tensor, options: LossOptions, class_weights: torch.Tensor | None
) -> RowStats:
    """Every statistic of `(N, V)` logits, by autograd; an ignored row gives 0 and no gradient, whatever it holds."""
    vocab_size = logits.shape[-1]
    valid = target != options.ignore_index
    in_range = (target >= 0) & (target < vocab_size)
    label = torch.where(in_range, target, 0).unsqueeze(-1).long()
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = transformed_logits(x.masked_fill(~valid.unsqueeze(-1), 0.0), options)
    log_probs = torch.log_softmax(z, dim=-1)
    nll = -log_probs.gather(-1, label).squeeze(-1)
    nll = torch.where(in_range, nll, math.nan)
    lse = torch.logsumexp(z, dim=-1)
    weights = 1.0 if class_weights is None else class_weights
    label_weight = 1.0 if class_weights is None else class_weights[label.squeeze(-1)]
    loss = (1.0 - options.label_smoothing) * label_weight * nll
    if options.label_smoothing > 0.0:
        loss = loss - options.label_smoothing / vocab_size * (log_probs * weights).sum(-1)
    if options.z_loss != 0.0:
        loss = loss + options.z_loss * lse.square()
    with torch.no_grad():
        entropy = torch.special.entr(log_probs.exp()).sum(-1)
        predicted = torch.where(valid, z.argmax(-1), -1)
    loss, nll, lse, entropy = (torch.where(valid, row, 0.0) for row in (loss, nll, lse, entropy))
    return RowStats(loss, nll.detach(), lse.detach(), entropy, predicted)
