"""Losses and log-probabilities of deferred logits: by one operator, or chunk by chunk where a module has to run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from liger_trainer.head.chunked_module import ModuleCall, chunked_rows
from liger_trainer.head.deferred_logits import DeferredLogits
from liger_trainer.head.labelled_rows import LabelledRows, rows_with_label
from liger_trainer.head.lm_head import linear, through_owner
from liger_trainer.head.step import current_step, expected_gradient
from liger_trainer.head.vocab_parallel import VocabParallelCall, vocab_parallel_loss
from liger_trainer.kernels.head.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_trainer.kernels.head.linear_cross_entropy import linear_cross_entropy
from liger_trainer.kernels.head.linear_log_probs import linear_log_probs, log_probs_of_head
from liger_trainer.kernels.head.log_probs import log_probs
from liger_trainer.kernels.head.loss_options import LossOptions, checked_class_weights, inverse_normalizer
from liger_trainer.kernels.head.token_statistics import LogProbsOutput
from liger_trainer.kernels.runtime import saved_as_is
from liger_trainer.parallel.vocab_parallel import vocab_parallel_linear_log_probs

_ROW_MULTIPLE = 512  # of K: few different shapes, so that the allocator finds the same blocks again
_MOST_OF_ALL = 0.9  # of all rows; above, gathering costs more than it saves
_DEVICES = ("cpu", "cuda")  # elsewhere torch.nonzero_static may be missing, and a count may stall the device


def labelled_rows(
    hidden: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int,
    logits_memory: int,
    teacher: torch.Tensor | None = None,
) -> LabelledRows | None:
    """The rows to multiply; None for all, where the host knows no bound of the labels' number that saves enough.

    The step never takes more memory than with all rows. What more than half of the rows take, once gathered and once
    as their gradient, comes out of `logits_memory`; where that would be more than half of it, all rows are multiplied.

    Args:
        hidden: `(..., H)`.
        target: `(...)`, integers.
        ignore_index: The label of the tokens without one.
        logits_memory: Bytes that the operator may spend on a chunk of logits.
        teacher: `(..., X)` of the same tokens, without gradient, if its rows are gathered too.
    """
    if torch.compiler.is_compiling() or hidden.device.type not in _DEVICES:
        return None
    total = target.numel()
    worth = math.floor(_MOST_OF_ALL * total)
    is_known = worth >= _ROW_MULTIPLE and hidden.shape[:-1].numel() == total  # the operator says what is wrong
    count = current_step().labelled if is_known else None
    if count is None:
        return None
    most = count()
    kept = max(1, -(-most // _ROW_MULTIPLE)) * _ROW_MULTIPLE
    memory = logits_memory - _more_memory(kept, total, hidden, teacher)
    if kept > worth or memory < logits_memory // 2:
        return None
    return rows_with_label(kept, target, ignore_index, memory)


def _more_memory(kept: int, total: int, hidden: torch.Tensor, teacher: torch.Tensor | None) -> int:
    """Bytes that the gathered rows take, less what the gradient of the others would have taken; at least 0."""
    differentiable = torch.is_grad_enabled() and hidden.requires_grad
    more = (kept - (total - kept if differentiable else 0)) * hidden.shape[-1] * hidden.element_size()
    if teacher is not None:
        more += kept * teacher.shape[-1] * teacher.element_size()
    return max(0, more)


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
        size_average: Deprecated in torch; not supported.
        ignore_index: As in torch.
        reduce: Deprecated in torch; not supported.
        reduction: As in torch. With "mean" and no valid token the loss is 0 where torch's is NaN.
        label_smoothing: As in torch.

    Returns:
        The loss, in the dtype of torch's; NotImplemented if this is not the cross entropy over the last dimension with
        class ids, or if the model does more to its logits than a soft-cap and a scale.
    """
    form = input.recorded.chain.fused_form
    is_ours = (
        input.meta.dim() == 2
        and isinstance(target, torch.Tensor)
        and target.dim() == 1
        and target.dtype in (torch.int64, torch.int32)
        and size_average is None
        and reduce is None
        and reduction in ("mean", "sum", "none")
        and (weight is None or not weight.requires_grad)
        and 0.0 <= label_smoothing <= 1.0
    )
    call, hidden = input.recorded.call, input.recorded.hidden
    if form is None or not is_ours or (isinstance(call, VocabParallelCall) and weight is not None):
        return NotImplemented
    # Native autocast runs cross entropy in fp32; without it, the loss has the dtype of the logits.
    dtype = torch.float32 if torch.is_autocast_enabled(hidden.device.type) else input.meta.dtype
    outputs = () if current_step().observer is None else ("token_nll", "predicted_tokens")
    if isinstance(call, ModuleCall):
        found = chunked_cross_entropy(input, target, ignore_index, reduction, label_smoothing, weight, outputs)
        return _observed(found, target, ignore_index).to(dtype)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
        "softcap": form.softcap,
        "logit_scale": form.logit_scale,
        "outputs": outputs,
    }
    if weight is not None:
        options["class_weights"] = weight
    target = target.to(hidden.device)
    with input.operands() as (hidden, matrix, bias):
        rows, memory = labelled_rows(hidden, target, ignore_index, call.logits_memory), call.logits_memory
        if rows is not None:
            hidden, target, memory = rows.gathered(hidden), rows.target, rows.logits_memory
        if isinstance(call, VocabParallelCall):
            loss = vocab_parallel_loss(call, hidden, matrix, bias, target, memory, **options)
        elif call.fused:
            options |= {"logits_memory": memory, "expected_grad": expected_gradient(reduction)}
            with saved_as_is():
                loss = linear_cross_entropy(hidden, matrix, target, bias=bias, **options)
        else:
            built = linear(hidden, matrix, bias, call.dtype)
            with saved_as_is():
                loss = cross_entropy(built, target, **options)
    loss = _observed(loss, target, ignore_index)
    if rows is not None and reduction == "none":
        loss = rows.scattered(loss)
    call.has_loss = call.has_loss or loss.requires_grad
    return through_owner(call.head, loss).to(dtype)


def _observed(found: torch.Tensor | CrossEntropyOutput, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    """The loss in `found`, after its tokens were reported to the step's observer."""
    observe = current_step().observer
    if isinstance(found, torch.Tensor) or observe is None:
        assert isinstance(found, torch.Tensor)
        return found
    assert found.token_nll is not None
    labels = target.to(found.loss.device)
    labelled = labels != ignore_index
    right = labelled & (found.predicted_tokens == labels)
    observe(found.token_nll.sum(), right.sum(), labelled.sum())
    return found.loss


def head_log_probs(
    logits: DeferredLogits,
    target: torch.Tensor,
    outputs: Sequence[str],
    temperature: float = 1.0,
    retain_memory: int | None = None,
    ignore_index: int = -100,
    expected_grad: float | torch.Tensor | None = None,
    recomputed: bool = False,
) -> LogProbsOutput:
    """Log-probabilities of deferred `logits` and statistics of the distributions, for any loss of them.

    Args:
        logits: `(..., V)`, of a fused head; their chain is a soft-cap and a scale (`fused_form` is not None).
        target: `(...)` class ids.
        outputs: At least one name that `linear_log_probs` takes.
        temperature: Divides the logits.
        retain_memory: Bytes of logits saved for the backward; by default one chunk.
        ignore_index: Label of the positions that do not count.
        expected_grad: As in `linear_log_probs`; not used for a head split over processes.
        recomputed: Whether the hooks of a checkpoint around this see what is saved, and no logits are retained.

    Returns:
        As `linear_log_probs`.
    """
    call, form = logits.recorded.call, logits.recorded.chain.fused_form
    assert form is not None
    assert not isinstance(call, ModuleCall)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "temperature": temperature,
        "softcap": form.softcap,
        "logit_scale": form.logit_scale,
        "outputs": outputs,
        "retain_memory": 0 if recomputed else retain_memory,
        "logits_memory": call.logits_memory,
    }
    loss = LossOptions(ignore_index, 0.0, 0.0, form.softcap, form.logit_scale, temperature)
    target = target.to(logits.recorded.hidden.device)
    with logits.operands() as (hidden, weight, bias), contextlib.nullcontext() if recomputed else saved_as_is():
        rows = labelled_rows(hidden, target, ignore_index, call.logits_memory)
        if rows is not None:
            hidden, target, options["logits_memory"] = rows.gathered(hidden), rows.target, rows.logits_memory
        if isinstance(call, VocabParallelCall):
            result = vocab_parallel_linear_log_probs(
                hidden, weight, target, bias_shard=bias, **call.group_options, **options
            )
        elif (
            temperature > 0.0
            and (retain_memory or 0) >= 0
            and target.dtype in (torch.int64, torch.int32)
            and target.shape == hidden.shape[:-1]
            and weight.device == hidden.device
        ):  # all else was proved when the logits were deferred, and `operands` has cast
            budgets = options["logits_memory"], options["retain_memory"]
            result = log_probs_of_head(hidden, weight, target, bias, loss, outputs, *budgets, expected_grad)
        else:  # which says what is wrong
            result = linear_log_probs(hidden, weight, target, bias, expected_grad=expected_grad, **options)
    assert isinstance(result, LogProbsOutput)
    call.has_loss = call.has_loss or result.log_probs.requires_grad
    found: dict[str, Any] = {}
    for field in dataclasses.fields(result):
        values = getattr(result, field.name)
        if values is not None:
            values = values if rows is None else rows.scattered(values)
            found[field.name] = through_owner(call.head, values)
    return LogProbsOutput(**found)


def chunked_cross_entropy(
    logits: Any,
    target: torch.Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    class_weights: torch.Tensor | None,
    outputs: Sequence[str] = (),
) -> torch.Tensor | CrossEntropyOutput:
    """``F.cross_entropy`` of deferred `logits` `(..., V)` of any head, one chunk of tokens at a time.

    With `outputs`, values of each token that `cross_entropy` takes, it is a `CrossEntropyOutput`.
    """
    hidden = logits.recorded.hidden
    target = target.to(hidden.device)
    class_weights = checked_class_weights(
        class_weights, logits.meta.shape[-1], hidden, target, ignore_index, average=reduction == "mean"
    )

    def losses(rows: torch.Tensor, labels: torch.Tensor) -> list[Any]:
        found: Any = cross_entropy(
            *(rows, labels, ignore_index, "none", None, label_smoothing),
            class_weights=class_weights,
            outputs=outputs,
        )
        return [found.loss, *(getattr(found, name) for name in outputs)] if outputs else [found]

    rows = labelled_rows(hidden, target.reshape(-1), ignore_index, logits.recorded.call.logits_memory)
    loss, *tokens = chunked_rows(logits, losses, target, rows=rows)
    if reduction != "none":
        loss = loss.sum() * inverse_normalizer(target, ignore_index, reduction, None, loss.dtype)
    return CrossEntropyOutput(loss, **dict(zip(outputs, tokens))) if outputs else loss


def chunked_log_probs(
    logits: Any, target: torch.Tensor, outputs: Sequence[str], temperature: float = 1.0, ignore_index: int = -100
) -> LogProbsOutput:
    """As `head_log_probs`, for deferred `logits` of any head and any chain, one chunk of tokens at a time."""

    def statistics(rows: torch.Tensor, labels: torch.Tensor) -> list[Any]:
        found: Any = log_probs(rows, labels, ignore_index, temperature, outputs=outputs)
        return [found.log_probs, *(getattr(found, name) for name in outputs)]

    hidden, target = logits.recorded.hidden, target.to(logits.device)
    rows = labelled_rows(hidden, target.reshape(-1), ignore_index, logits.recorded.call.logits_memory)
    chosen, *others = chunked_rows(logits, statistics, target, rows=rows)
    return LogProbsOutput(chosen, **dict(zip(outputs, others)))
