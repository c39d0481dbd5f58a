"""Cross entropy and log-probabilities of a vocabulary that is split over a process group, logits or head.

Every process holds the logits, or the rows of the head, of a contiguous part of the vocabulary, and all hold the same
tokens. One process's part of a row is eight numbers (`RowPartials`): the row kernel makes them in its one pass over the
shard, one all-gather of (N, 8) exchanges them, and every process combines them alike, without cancellation however
confident a token is. With the statistics of the whole row in hand, the gradient of a shard's logits is local.

For a head, dW stays with its shard and dX is summed over the group once, in the backward. The chunks, and which logits
are kept for the backward, are those of `linear_log_probs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from liger_trainer.kernels.autocast import head_as_autocast
from liger_trainer.kernels.head.cross_entropy_options import (
    CrossEntropyOutput,
    ExtraStats,
    RowOptions,
    RowStats,
    Shard,
    check_options,
    inverse_normalizer,
    with_outputs,
)
from liger_trainer.kernels.head.linear_log_probs import (
    LOG_PROBS_OUTPUTS,
    LogProbsOutput,
    check_retain_memory,
    log_probs_with_outputs,
)
from liger_trainer.kernels.head.linear_row_gradients import attach_gradients
from liger_trainer.kernels.head.linear_rows import kept_rows
from liger_trainer.kernels.head.logit_rows import row_view
from liger_trainer.kernels.head.loss_checks import check_labels_on_cpu, check_linear, check_outputs, check_target
from liger_trainer.kernels.head.row_partials import combine
from liger_trainer.parallel.vocab_parallel_rows import (
    VocabGroup,
    attach_logits,
    linear_partials,
    logits_partials,
    resolve_group,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def vocab_parallel_cross_entropy(
    logits_shard: torch.Tensor,
    target: torch.Tensor,
    group: ProcessGroup | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = (),
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    smoothing_scope: str = "global",
) -> torch.Tensor | CrossEntropyOutput:
    """`cross_entropy` of logits whose vocabulary is split over the processes of `group`.

    Every process passes the same tokens and gets the same loss; the gradient of its own logits comes back. One
    all-gather of 32 bytes a token, and nothing in the backward.

    Args:
        logits_shard: `(..., V_local)` of fp16, bf16 or fp32 (float64 on the CPU), the columns of this process.
        target: `(...)` of int64 or int32, ids of the whole vocabulary.
        group: The process group; the default group if None. Process r of it holds the r-th part of the vocabulary.
        ignore_index: As for `cross_entropy`, like all options up to `outputs`.
        reduction: "mean", "sum" or "none".
        num_items: Divides the sum of the token losses.
        label_smoothing: In [0, 1].
        z_loss: Factor of ``lse**2``.
        softcap: Soft-cap of the logits.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap.
        outputs: Names of extra outputs.
        vocab_start: The id of the first column here; by default all shards but the last are of equal size.
        vocab_size: Ids in all; by default processes times V_local, so give it where the last shard is smaller.
        smoothing_scope: "global", or "partition": smoothing over the columns of each process alone, as Megatron-LM
            does, with a loss that differs between the processes.

    Returns:
        The fp32 loss, 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        RuntimeError: Without a process group, or in a backward with ``create_graph=True``.
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
    """
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    if smoothing_scope not in ("global", "partition"):
        raise ValueError(f"`smoothing_scope` is {smoothing_scope!r}; it must be 'global' or 'partition'.")
    if logits_shard.dim() < 1 or not logits_shard.is_floating_point():
        raise ValueError(
            f"`logits_shard` has shape {tuple(logits_shard.shape)} and dtype {logits_shard.dtype}; "
            "give floats of (..., V_local)."
        )
    columns = logits_shard.shape[-1]
    check_target(target, logits_shard.shape[:-1], columns, logits_shard, "logits_shard")
    place = resolve_group(group, columns, vocab_start, vocab_size)
    check_labels_on_cpu(target, place.vocab_size, ignore_index)
    labels, rows = target.reshape(-1).contiguous(), row_view(logits_shard)
    own = place.rank if smoothing_scope == "partition" else None
    shard = Shard(place.vocab_start, place.vocab_size if own is None else columns)
    with torch.no_grad():
        partials = place.gathered(logits_partials(rows, labels, *options, *shard))
        stats, _ = combine(partials, labels, options, shard, place.vocab_size, own)
    loss = stats.loss
    if torch.is_grad_enabled() and logits_shard.requires_grad:
        loss = attach_logits(loss, rows, labels, stats.nll, stats.lse, *options, *shard)
    return _reduced(loss, stats, target, options, reduction, num_items, outputs)


def _reduced(
    loss: torch.Tensor,
    stats: RowStats,
    target: torch.Tensor,
    options: RowOptions,
    reduction: str,
    num_items: int | torch.Tensor | None,
    outputs: Sequence[str],
) -> torch.Tensor | CrossEntropyOutput:
    if reduction == "none":
        return with_outputs(loss.view(target.shape), outputs, stats, target, options, None)
    scale = inverse_normalizer(target, options.ignore_index, reduction, num_items, loss.dtype)
    return with_outputs(loss.sum() * scale, outputs, stats, target, options, scale)


def _linear_rows(
    hidden: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    bias_shard: torch.Tensor | None,
    options: RowOptions,
    logits_memory: int,
    retain_memory: int | None,
    place: VocabGroup,
) -> tuple[RowStats, ExtraStats]:
    """The statistics of all tokens, `loss` and `entropy` of them differentiable."""
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    shard = Shard(place.vocab_start, place.vocab_size)
    tensors = (hidden, weight_shard, bias_shard)
    trained = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    keep = kept_rows(flat, weight_shard, logits_memory, retain_memory) if trained else 0
    with torch.no_grad():
        partials, kept = linear_partials(flat, weight_shard, labels, bias_shard, *options, logits_memory, keep, *shard)
        stats, extra = combine(place.gathered(partials), labels, options, shard, place.vocab_size, None)
    if trained:
        loss, entropy = attach_gradients(
            stats.loss, flat.new_empty(0), flat, weight_shard, labels, bias_shard, stats.nll, stats.lse, stats.entropy,
            kept, *options, logits_memory, *shard, place.name,
        )  # fmt: skip
        stats = stats._replace(loss=loss, entropy=entropy)
    return stats, extra


def vocab_parallel_linear_cross_entropy(
    hidden: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    group: ProcessGroup | None = None,
    bias_shard: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_items: int | torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    outputs: Sequence[str] = (),
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_memory: int = 512 * 2**20,
    retain_memory: int | None = None,
) -> torch.Tensor | CrossEntropyOutput:
    """`linear_cross_entropy` of a head whose rows are split over the processes of `group`.

    Every process passes the same hidden states and labels and gets the same loss and the whole gradient of `hidden`,
    summed over the group once in the backward; that of `weight_shard` and `bias_shard` is its own.

    Args:
        hidden: `(..., H)`, the same on every process.
        weight_shard: `(V_local, H)` of the dtype of `hidden`, the rows of this process; under autocast as in
            `linear_log_probs`.
        target: `(...)` of int64 or int32, ids of the whole vocabulary.
        group: The process group; the default group if None. Process r of it holds the r-th part of the vocabulary.
        bias_shard: `(V_local,)`, floating.
        ignore_index: As for `linear_cross_entropy`, like all options up to `outputs`.
        reduction: "mean", "sum" or "none".
        num_items: Divides the sum of the token losses.
        label_smoothing: In [0, 1].
        z_loss: Factor of ``lse**2``.
        softcap: Soft-cap of the logits.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap.
        outputs: Names of extra outputs.
        vocab_start: The id of the first row here; by default all shards but the last are of equal size.
        vocab_size: Ids in all; by default processes times V_local, so give it where the last shard is smaller.
        logits_memory: Bytes for the chunk of logits, as for `linear_log_probs`.
        retain_memory: Bytes of logits kept for the backward, as for `linear_log_probs`.

    Returns:
        The fp32 loss, 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        RuntimeError: Without a process group, or in a backward with ``create_graph=True``.
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
    """
    options = RowOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    hidden, weight_shard, bias_shard = head_as_autocast(hidden, weight_shard, bias_shard)
    check_linear(hidden, weight_shard, target, bias_shard, logits_memory)
    check_retain_memory(retain_memory)
    place = resolve_group(group, weight_shard.shape[0], vocab_start, vocab_size)
    stats, _ = _linear_rows(hidden, weight_shard, target, bias_shard, options, logits_memory, retain_memory, place)
    return _reduced(stats.loss, stats, target, options, reduction, num_items, outputs)


def vocab_parallel_linear_log_probs(
    hidden: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    group: ProcessGroup | None = None,
    bias_shard: torch.Tensor | None = None,
    ignore_index: int = -100,
    temperature: float = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    outputs: Sequence[str] = (),
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    logits_memory: int = 512 * 2**20,
    retain_memory: int | None = None,
) -> torch.Tensor | LogProbsOutput:
    """`linear_log_probs` of a head whose rows are split over the processes of `group`.

    Every process gets the same outputs, and must take the same loss of them; gradients are those of
    `vocab_parallel_linear_cross_entropy`.

    Args:
        hidden: `(..., H)`, the same on every process.
        weight_shard: `(V_local, H)` of the dtype of `hidden`, the rows of this process; under autocast as in
            `linear_log_probs`.
        target: `(...)` of int64 or int32, ids of the whole vocabulary.
        group: The process group; the default group if None. Process r of it holds the r-th part of the vocabulary.
        bias_shard: `(V_local,)`, floating.
        ignore_index: Tokens with this label give 0 and no gradient.
        temperature: Divides the logits after the soft-cap.
        softcap: Soft-cap of the logits.
        logit_scale: Factor of the logits before the soft-cap.
        outputs: Names among "entropy", "top1", "mean_logit" and "sum_squared_probs".
        vocab_start: The id of the first row here; by default all shards but the last are of equal size.
        vocab_size: Ids in all; by default processes times V_local, so give it where the last shard is smaller.
        logits_memory: Bytes for the chunk of logits.
        retain_memory: Bytes of logits kept for the backward, by default one chunk.

    Returns:
        fp32 log-probabilities shaped as `target`; with `outputs` a `LogProbsOutput`.

    Raises:
        RuntimeError: Without a process group, or in a backward with ``create_graph=True``.
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
    """
    options = RowOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    check_options(options, "none", None, ())
    check_outputs(outputs, LOG_PROBS_OUTPUTS)
    hidden, weight_shard, bias_shard = head_as_autocast(hidden, weight_shard, bias_shard)
    check_linear(hidden, weight_shard, target, bias_shard, logits_memory)
    check_retain_memory(retain_memory)
    place = resolve_group(group, weight_shard.shape[0], vocab_start, vocab_size)
    stats, extra = _linear_rows(hidden, weight_shard, target, bias_shard, options, logits_memory, retain_memory, place)
    labels = target.reshape(-1)
    return log_probs_with_outputs(
        0.0 - stats.loss, stats.entropy, stats.predicted, *extra, labels, ignore_index, outputs, target.shape
    )
