"""Cross entropy and log-probabilities of a vocabulary that is split over a process group, for logits or a head.

Every process holds the logits, or the rows of the head, of a contiguous part of the vocabulary, and all hold the same
tokens. One process's contribution to a row is eight numbers (`RowPartials`): the row kernel computes them in its one
pass over the shard, one all-gather of (N, 8) exchanges them, and every process combines them in the same way, without
cancellation however confident a token is. With the statistics of the whole row, the gradient of a shard's logits is
local.

For a head, dW stays with its shard and dX is summed over the group once, in the backward. The chunks, and the logits
retained for the backward, are those of `linear_log_probs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import COLLECTIVES
from liger_trainer.kernels.autograd import input_gradients, refuse_double_backward
from liger_trainer.kernels.head.cross_entropy import CrossEntropyOutput, logits_gradient, reduced
from liger_trainer.kernels.head.cross_entropy_rows import row_partials_
from liger_trainer.kernels.head.head_chunks import Needs, logits_buffer, retained_rows
from liger_trainer.kernels.head.linear_log_probs_gradients import HeadRows, attach_gradients, forward_logits
from liger_trainer.kernels.head.logit_rows import row_view
from liger_trainer.kernels.head.loss_options import (
    LossOptions,
    check_linear,
    check_logits,
    check_options,
    check_outputs,
    check_retain_memory,
)
from liger_trainer.kernels.head.token_statistics import (
    LOG_PROBS_OUTPUTS,
    ExtraStats,
    LogProbsOutput,
    RowStats,
    Shard,
    check_labels_on_cpu,
    combine,
    log_probs_with_outputs,
)
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import as_autocast, fp32_reductions

if dist.is_available():
    require(COLLECTIVES)
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@operator("liger_trainer::linear_partials")
def linear_partials(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    options: LossOptions,
    logits_memory: int,
    retain: int,
    shard: Shard,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `(N, 8)` partials of this shard of a head, and the logits of the last `retain` tokens."""
    partials = hidden.new_empty(target.numel(), 8, dtype=torch.promote_types(hidden.dtype, torch.float32))
    check_labels_on_cpu(target, shard.vocab_size, options.ignore_index)
    retained: list[torch.Tensor] = []
    with fp32_reductions(weight):
        for start, stop, logits in forward_logits(hidden, weight, logits_memory, retain, retained):
            row_partials_(logits, target[start:stop], partials[start:stop], options, shard, bias, logits.stride(0))
    return partials, retained[0]


@linear_partials.register_fake
def _(hidden, weight, target, bias, options, logits_memory, retain, shard):
    partials = hidden.new_empty(target.numel(), 8, dtype=torch.promote_types(hidden.dtype, torch.float32))
    return partials, logits_buffer(hidden, weight, retain)


@operator("liger_trainer::logits_partials")
def logits_partials(logits: torch.Tensor, target: torch.Tensor, options: LossOptions, shard: Shard) -> torch.Tensor:
    """The `(N, 8)` partials of a shard of the logits."""
    partials = logits.new_empty(target.numel(), 8, dtype=torch.promote_types(logits.dtype, torch.float32))
    row_partials_(logits, target, partials, options, shard)
    return partials


@operator("liger_trainer::logits_rows_attach")
def attach_logits(
    loss: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    nll: torch.Tensor,
    lse: torch.Tensor,
    options: LossOptions,
    shard: Shard,
) -> torch.Tensor:
    """`loss`, which is already known, as a differentiable function of the logits."""
    return loss.clone()


def _attach_logits_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _loss, logits, target, nll, lse, *ctx.options = inputs
    ctx.save_for_backward(logits, target, nll, lse)


def _attach_logits_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    refuse_double_backward("the vocabulary-parallel losses")
    gradient = logits_gradient(grad, None, *ctx.saved_tensors, None, None, *ctx.options)
    return input_gradients(ctx, None, gradient)


attach_logits.register_autograd(_attach_logits_backward, setup_context=_attach_logits_setup)


class VocabGroup(NamedTuple):
    """A process group by its name, and where the columns of this process lie in the vocabulary."""

    name: str
    rank: int
    size: int
    vocab_start: int
    vocab_size: int

    def gathered(self, partials: torch.Tensor) -> torch.Tensor:
        """The `(world, N, 8)` partials of all processes."""
        collectives = torch.ops._c10d_functional  # traced by torch.compile, and the same in eager mode
        everyone = collectives.wait_tensor(collectives.all_gather_into_tensor(partials, self.size, self.name))
        return everyone.view(self.size, *partials.shape)


def resolve_group(
    group: ProcessGroup | None, columns: int, vocab_start: int | None, vocab_size: int | None
) -> VocabGroup:
    """The group, and where this process's `columns` lie in the vocabulary."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "A vocab-parallel operator needs a process group: call torch.distributed.init_process_group first, "
            "or use the operator of the same name without `vocab_parallel_`."
        )
    group = dist.group.WORLD if group is None else group
    assert group is not None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    vocab_size = size * columns if vocab_size is None else vocab_size
    if vocab_start is None:
        vocab_start = rank * columns if rank < size - 1 else vocab_size - columns
    if vocab_start < 0 or vocab_start + columns > vocab_size:
        raise ValueError(
            f"The shard of process {rank}, {columns} columns from {vocab_start} on, is not within the vocabulary of "
            f"{vocab_size}; give `vocab_size`, and `vocab_start` if a shard other than the last has another size."
        )
    return VocabGroup(group.group_name, rank, size, vocab_start, vocab_size)


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

    Every process passes the same tokens and gets the same loss and the gradient of its own logits. The forward takes
    one all-gather of 32 bytes a token, the backward no communication.

    Args:
        logits_shard: `(..., V_local)` of fp16, bf16 or fp32 (float64 on the CPU), the columns of this process.
        target: `(...)` of int64 or int32, ids of the whole vocabulary.
        group: The process group; the default group if None. Process r of it holds the r-th part of the vocabulary.
        ignore_index: As for `cross_entropy`, like all options up to `outputs`.
        reduction: "mean", "sum" or "none".
        num_items: Divides the sum of the token losses.
        label_smoothing: A number in [0, 1].
        z_loss: Factor of ``lse**2``.
        softcap: Soft-cap of the logits.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap.
        outputs: Names of extra outputs.
        vocab_start: The id of the first column here; by default all shards but the last are of equal size.
        vocab_size: Ids in all; by default processes times V_local, so give it if the last shard is smaller.
        smoothing_scope: "global", or "partition": smoothing over the columns of each process alone, as Megatron-LM
            does; the loss then differs between the processes.

    Returns:
        The fp32 loss, 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        RuntimeError: Without a process group, or in a backward with ``create_graph=True``.
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    if smoothing_scope not in ("global", "partition"):
        raise ValueError(f"`smoothing_scope` is {smoothing_scope!r}; it must be 'global' or 'partition'.")
    check_logits(logits_shard, target, "logits_shard")
    columns = logits_shard.shape[-1]
    place = resolve_group(group, columns, vocab_start, vocab_size)
    check_labels_on_cpu(target, place.vocab_size, ignore_index)
    labels, rows = target.reshape(-1).contiguous(), row_view(logits_shard)
    own = place.rank if smoothing_scope == "partition" else None
    shard = Shard(place.vocab_start, place.vocab_size if own is None else columns)
    with torch.no_grad():
        partials = place.gathered(logits_partials(rows, labels, options, shard))
        stats, _ = combine(partials, labels, options, shard, place.vocab_size, own)
    loss = stats.loss
    if torch.is_grad_enabled() and logits_shard.requires_grad:
        loss = attach_logits(loss, rows, labels, stats.nll, stats.lse, options, shard)
    return reduced(loss, stats, target, options, reduction, num_items, outputs)


def _linear_rows(
    hidden: torch.Tensor,
    weight_shard: torch.Tensor,
    target: torch.Tensor,
    bias_shard: torch.Tensor | None,
    options: LossOptions,
    logits_memory: int,
    retain_memory: int | None,
    group: ProcessGroup | None,
    vocab_start: int | None,
    vocab_size: int | None,
) -> tuple[RowStats, ExtraStats]:
    """Checks the operands and gives the statistics of all tokens; `loss` and `entropy` are differentiable."""
    hidden, weight_shard, bias_shard = as_autocast(hidden), as_autocast(weight_shard), as_autocast(bias_shard)
    check_linear(hidden, weight_shard, target, bias_shard, logits_memory)
    check_retain_memory(retain_memory)
    place = resolve_group(group, weight_shard.shape[0], vocab_start, vocab_size)
    flat, labels = hidden.reshape(-1, hidden.shape[-1]).contiguous(), target.reshape(-1).contiguous()
    shard = Shard(place.vocab_start, place.vocab_size)
    trained = any(Needs.of(hidden, weight_shard, bias_shard))
    retain = retained_rows(flat, weight_shard, logits_memory, retain_memory) if trained else 0
    with torch.no_grad():
        partials, retained = linear_partials(
            flat, weight_shard, labels, bias_shard, options, logits_memory, retain, shard
        )
        stats, extra = combine(place.gathered(partials), labels, options, shard, place.vocab_size, None)
    if trained:
        rows = HeadRows(flat, weight_shard, labels, bias_shard, stats.nll, stats.lse, stats.entropy, retained)
        loss, entropy = attach_gradients(stats.loss, flat.new_empty(0), rows, options, logits_memory, shard, place.name)
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
        label_smoothing: A number in [0, 1].
        z_loss: Factor of ``lse**2``.
        softcap: Soft-cap of the logits.
        logit_scale: Factor of the logits before the soft-cap.
        temperature: Divides the logits after the soft-cap.
        outputs: Names of extra outputs.
        vocab_start: The id of the first row here; by default all shards but the last are of equal size.
        vocab_size: Ids in all; by default processes times V_local, so give it if the last shard is smaller.
        logits_memory: Bytes for the chunk of logits, as for `linear_log_probs`.
        retain_memory: Bytes of logits retained for the backward, as for `linear_log_probs`.

    Returns:
        The fp32 loss, 0-d or shaped as `target`; with `outputs` a `CrossEntropyOutput`.

    Raises:
        RuntimeError: Without a process group, or in a backward with ``create_graph=True``.
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
    """
    options = LossOptions(ignore_index, label_smoothing, z_loss, softcap, logit_scale, temperature)
    check_options(options, reduction, num_items, outputs)
    stats, _ = _linear_rows(
        hidden, weight_shard, target, bias_shard, options, logits_memory, retain_memory, group, vocab_start, vocab_size
    )
    return reduced(stats.loss, stats, target, options, reduction, num_items, outputs)


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

    Every process gets the same outputs and must compute the same loss from them; gradients are as for
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
        vocab_size: Ids in all; by default processes times V_local, so give it if the last shard is smaller.
        logits_memory: Bytes for the chunk of logits.
        retain_memory: Bytes of logits retained for the backward, by default one chunk.

    Returns:
        fp32 log-probabilities shaped as `target`; with `outputs` a `LogProbsOutput`.

    Raises:
        RuntimeError: Without a process group, or in a backward with ``create_graph=True``.
        ValueError: For a shape, dtype, device, option or (on the CPU) label that is not allowed.
    """
    options = LossOptions(ignore_index, 0.0, 0.0, softcap, logit_scale, temperature)
    check_options(options, "none", None, ())
    check_outputs(outputs, LOG_PROBS_OUTPUTS)
    stats, extra = _linear_rows(
        hidden, weight_shard, target, bias_shard, options, logits_memory, retain_memory, group, vocab_start, vocab_size
    )
    labels = target.reshape(-1)
    return log_probs_with_outputs(
        0.0 - stats.loss, stats.entropy, stats.predicted, *extra, labels, ignore_index, outputs, target.shape
    )
