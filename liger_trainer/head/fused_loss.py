"""Losses and log-probabilities of deferred logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.head.chunked_module import ModuleCall, chunked_cross_entropy
from liger_trainer.head.context import expected_gradient
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.lm_head import gathered, linear, through_owner
from liger_trainer.head.vocab_parallel import VocabParallelCall, vocab_parallel_log_probs, vocab_parallel_loss
from liger_trainer.kernels.autograd import saved_as_is
from liger_trainer.kernels.head.cross_entropy import cross_entropy
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs
from liger_trainer.kernels.head.log_probs import LogProbsOutput


def deferred_cross_entropy(
    input: DeferredLogits,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``F.cross_entropy(input, target, ...)`` without the logits.

    Args:
        input: `(N, V)`, deferred.
        target: `(N,)` class ids.
        weight: `(V,)` class weights.
        size_average: Deprecated in torch; not taken here.
        ignore_index: As in torch.
        reduce: Deprecated in torch; not taken here.
        reduction: As in torch. With "mean" and no valid token the loss is 0 where torch's is NaN.
        label_smoothing: As in torch.

    Returns:
        The loss, in the dtype torch's would have; NotImplemented where this is not the cross entropy of the last
        dimension with class ids, or where what was recorded is no soft-cap and scale.
    """
    form = input.recorded.chain.fused_form()
    is_ours = (
        form is not None
        and input.meta.dim() == 2
        and isinstance(target, torch.Tensor)
        and target.dim() == 1
        and target.dtype in (torch.int64, torch.int32)
        and size_average is None
        and reduce is None
        and reduction in ("mean", "sum", "none")
        and (weight is None or not weight.requires_grad)
        and 0.0 <= label_smoothing <= 1.0
    )
    is_split = isinstance(input.recorded.call, VocabParallelCall)
    if not is_ours or (is_split and weight is not None):
        return NotImplemented
    # Native autocast runs cross entropy in fp32; without it, the loss has the dtype of the logits.
    dtype = torch.float32 if torch.is_autocast_enabled(input.recorded.hidden.device.type) else input.meta.dtype
    if isinstance(input.recorded.call, ModuleCall):
        return chunked_cross_entropy(input, target, ignore_index, reduction, label_smoothing, weight).to(dtype)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    if weight is not None:
        options["class_weights"] = weight
    return head_loss(input, target, **options).to(dtype)


def head_loss(logits: Any, target: torch.Tensor, **options: Any) -> torch.Tensor:
    """The loss of deferred `logits` by the kernels: fused with the head, or on logits built for it alone.

    Args:
        logits: `(..., V)`, deferred, of a plain linear; what was recorded is a soft-cap and a scale (`fused_form` is
            not None).
        target: `(...)` class ids.
        options: Of the kernels; soft-cap, scale, memory and the expected gradient are added here.

    Returns:
        The loss.
    """
    call, hidden, form = logits.recorded.call, logits.recorded.hidden, logits.recorded.chain.fused_form()
    options |= {"softcap": form.softcap, "logit_scale": form.logit_scale}
    target = target.to(hidden.device)
    logits.recorded.check()
    of_call = vocab_parallel_loss if isinstance(call, VocabParallelCall) else _whole_head_loss
    loss = of_call(logits, target, **options)
    assert isinstance(loss, torch.Tensor)
    call.has_loss = call.has_loss or loss.requires_grad
    return through_owner(call.head, loss)


def _whole_head_loss(logits: Any, target: torch.Tensor, **options: Any) -> Any:
    """`head_loss` with the weight whole."""
    call, hidden = logits.recorded.call, logits.recorded.hidden
    with gathered(call) as (matrix, bias):
        if not logits.has_graph:
            hidden, matrix = hidden.detach(), matrix.detach()
            bias = None if bias is None else bias.detach()
        if call.fused:
            cast = [None if x is None else x.to(call.dtype) for x in (hidden, matrix, bias)]
            options["logits_memory"] = call.logits_memory
            options["expected_grad"] = expected_gradient(options["reduction"])
            with torch.autocast(hidden.device.type, enabled=False), saved_as_is():
                return linear_cross_entropy(cast[0], cast[1], target, bias=cast[2], **options)
        built = linear(hidden, matrix, bias, call.dtype)
        with torch.autocast(hidden.device.type, enabled=False), saved_as_is():
            return cross_entropy(built, target, **options)


def head_log_probs(
    logits: Any,
    target: torch.Tensor,
    outputs: Sequence[str],
    temperature: float = 1.0,
    retain_memory: int | None = None,
    ignore_index: int = -100,
    expected_grad: float | torch.Tensor | None = None,
) -> LogProbsOutput:
    """Log-probabilities of deferred `logits` and their statistics, for a loss that may weigh them in any way.

    Args:
        logits: `(..., V)`, deferred and fused; what was recorded is a soft-cap and a scale (`fused_form` is not None).
        target: `(...)` class ids.
        outputs: At least one of what `linear_log_probs` takes.
        temperature: Divides the logits.
        retain_memory: Bytes of logits kept for the backward; one chunk by default.
        ignore_index: Label of the positions to leave out.
        expected_grad: As of `linear_log_probs`; not used for a split head, whose logits are kept or recomputed.

    Returns:
        As `linear_log_probs`.
    """
    call, hidden, form = logits.recorded.call, logits.recorded.hidden, logits.recorded.chain.fused_form()
    logits.recorded.check()
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "temperature": temperature,
        "softcap": form.softcap,
        "logit_scale": form.logit_scale,
        "outputs": outputs,
        "retain_memory": retain_memory,
    }
    target = target.to(hidden.device)
    if isinstance(call, VocabParallelCall):
        result = vocab_parallel_log_probs(logits, target, **options)
    else:
        result = _whole_head_log_probs(logits, target, expected_grad=expected_grad, **options)
    assert isinstance(result, LogProbsOutput)
    call.has_loss = call.has_loss or result.log_probs.requires_grad
    entropy = None if result.entropy is None else through_owner(call.head, result.entropy)
    return dataclasses.replace(result, log_probs=through_owner(call.head, result.log_probs), entropy=entropy)


def _whole_head_log_probs(logits: Any, target: torch.Tensor, **options: Any) -> Any:
    """`head_log_probs` with the weight whole."""
    call, hidden = logits.recorded.call, logits.recorded.hidden
    with gathered(call) as (matrix, bias):
        if not logits.has_graph:
            hidden, matrix = hidden.detach(), matrix.detach()
            bias = None if bias is None else bias.detach()
        cast = [None if x is None else x.to(call.dtype) for x in (hidden, matrix, bias)]
        with torch.autocast(hidden.device.type, enabled=False), saved_as_is():
            return linear_log_probs(cast[0], cast[1], target, cast[2], logits_memory=call.logits_memory, **options)
