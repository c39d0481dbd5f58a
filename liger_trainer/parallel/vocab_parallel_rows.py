"""The rows of a vocabulary that is split over a process group: partial statistics and the gradient.

What is public of it, and how it works, is in `vocab_parallel`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from liger_trainer.kernels.autograd import refuse_double_backward
from liger_trainer.kernels.head.cross_entropy_options import (
    OPTIONS_SCHEMA,
    RowOptions,
    RowStats,
    Shard,
    compute_dtype,
)
from liger_trainer.kernels.head.cross_entropy_rows import row_gradient_, row_partials_
from liger_trainer.kernels.head.linear_rows import allocate_kept, linear_partials_
from liger_trainer.kernels.head.matmul_precision import fp32_reductions

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_SHARD = "SymInt vocab_start, SymInt vocab_size"


@torch.library.custom_op(
    "liger_trainer::linear_partials",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor weight, Tensor target, Tensor? bias, {OPTIONS_SCHEMA}, int logits_memory, "
    f"SymInt keep, {_SHARD}) -> (Tensor, Tensor)",
)
def linear_partials(hidden: Any, weight: Any, target: Any, bias: Any, *rest: Any) -> Any:
    """The `(N, 8)` partials of this shard of a head, and the logits of the last `keep` tokens."""
    partials = hidden.new_empty(target.numel(), 8, dtype=compute_dtype(hidden))
    with fp32_reductions(weight):
        kept = linear_partials_(
            hidden, weight, target, bias, RowOptions(*rest[:6]), rest[6], rest[7], Shard(*rest[8:]), partials
        )
    return partials, kept


@linear_partials.register_fake
def _(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: Any, *rest: Any) -> Any:
    partials = hidden.new_empty(target.numel(), 8, dtype=compute_dtype(hidden))
    return partials, allocate_kept(hidden, weight, rest[7])


@torch.library.custom_op(
    "liger_trainer::logits_partials",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, {OPTIONS_SCHEMA}, {_SHARD}) -> Tensor",
)
def logits_partials(logits: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The `(N, 8)` partials of a shard of the logits."""
    partials = logits.new_empty(target.numel(), 8, dtype=compute_dtype(logits))
    row_partials_(logits, target, partials, RowOptions(*rest[:6]), Shard(*rest[6:]))
    return partials


@logits_partials.register_fake
def _(logits: torch.Tensor, target: torch.Tensor, *rest: Any) -> torch.Tensor:
    return logits.new_empty(target.numel(), 8, dtype=compute_dtype(logits))


@torch.library.custom_op(
    "liger_trainer::logits_rows_gradient",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor logits, Tensor target, Tensor nll, Tensor lse, {OPTIONS_SCHEMA}, {_SHARD}) -> Tensor",
)
def logits_gradient(
    grad: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, nll: torch.Tensor, lse: torch.Tensor, *rest: Any
) -> torch.Tensor:
    """The gradient of a shard of the logits, contiguous, for upstream gradients of the token losses."""
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    stats = RowStats(lse, nll, lse, lse, lse)
    row_gradient_(logits, target, stats, RowOptions(*rest[:6]), grad, out=out, shard=Shard(*rest[6:]))
    return out


@logits_gradient.register_fake
def _(grad: torch.Tensor, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op(
    "liger_trainer::logits_rows_attach",
    mutates_args=(),
    schema=f"(Tensor loss, Tensor logits, Tensor target, Tensor nll, Tensor lse, {OPTIONS_SCHEMA}, {_SHARD}) -> Tensor",
)
def attach_logits(loss: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`loss`, known already, as a differentiable function of the logits."""
    return loss.clone()


@attach_logits.register_fake
def _(loss: torch.Tensor, *rest: Any) -> torch.Tensor:
    return torch.empty_like(loss)


def _attach_logits_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[1:5])
    ctx.options = inputs[5:]


def _attach_logits_backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    gradient = None
    if grad is not None:
        refuse_double_backward("the vocabulary-parallel losses")
        gradient = logits_gradient(grad, *ctx.saved_tensors, *ctx.options)
    return (None, gradient, *(None,) * 11)


attach_logits.register_autograd(_attach_logits_backward, setup_context=_attach_logits_setup)


class VocabGroup(NamedTuple):
    """A process group as the operators take it, and the columns of this process."""

    name: str
    rank: int
    size: int
    vocab_start: int
    vocab_size: int

    def gathered(self, partials: torch.Tensor) -> torch.Tensor:
        """The `(world, N, 8)` partials of all processes."""
        collectives = torch.ops._c10d_functional  # what torch.compile traces; eager takes them alike
        everyone = collectives.wait_tensor(collectives.all_gather_into_tensor(partials, self.size, self.name))
        return everyone.view(self.size, *partials.shape)


def resolve_group(
    group: ProcessGroup | None, columns: int, vocab_start: int | None, vocab_size: int | None
) -> VocabGroup:
    """The group and the place of this process's `columns` in the vocabulary.

    Raises:
        RuntimeError: Without a process group.
        ValueError: If the columns do not fit into the vocabulary.
    """
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
            f"{vocab_size}; give `vocab_size`, and `vocab_start` where not only the last shard is of another size."
        )
    return VocabGroup(group.group_name, rank, size, vocab_start, vocab_size)
