"""Sends the rows of tokens to the processes that hold their experts, and the results back.

Each process of a group has T tokens of its own, with k choices each, and a part of the experts. With its R = T k
choices sorted by expert (`kernels/moe/sort_by_expert.py`), the rows for one process are adjacent, and one all-to-all
sends them::

    send         x_r = hidden[order[r] // k]    w_r = weights[order[r]]
    bring back   o_t = sum over j of y_slots[t k + j]                        y_r = w_r * expert(x_r)

The routing weight travels with its row and is applied by the experts. So its gradient, ``<dO, expert(x)>``, is computed
there from what the experts save anyway, and the process that receives the results, (R, H), need not save them. The sums
over the k rows of a token, in the forward and in the gradient of hidden, are in fp32, in the order of j and without
atomics.

`bring_back` is two operators, as in `kernels/mlp/gated_down.py`: the first saves, the second exchanges. The
recomputation of a checkpoint that ends with the experts stops between them and sends nothing back.

The sizes of an exchange must be known to the host, see `plan_exchange`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import COLLECTIVES
from liger_trainer.kernels.autograd import input_gradients, pass_to_placeholder, refuse_second_derivative, where_needed
from liger_trainer.kernels.moe.sort_by_expert import ExpertRows, sort_by_expert
from liger_trainer.kernels.moe.token_rows import combine_rows
from liger_trainer.kernels.operator import operator

if dist.is_available():
    require(COLLECTIVES)
if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_FUNCTION = "experts of other processes"  # in errors


class Exchange(NamedTuple):
    """Which rows go where in one layer."""

    rows: ExpertRows  # the choices of this process, sorted by expert over the experts of all processes
    top_k: int  # k, the choices per token
    send_sizes: list[int]  # the number of rows to send to each process
    recv_sizes: list[int]  # the number of rows to receive from each process
    # int64 (sum of recv_sizes, 1), the expert of each received row, counted within this process.
    local_ids: torch.Tensor
    group: str  # name of the process group


def plan_exchange(top_k_index: torch.Tensor, num_local_experts: int, group: ProcessGroup) -> Exchange:
    """Agrees with the other processes of `group` on the sizes of an exchange.

    This reads the sizes from the device, because collectives take them from the host: the one host sync of a layer.

    Args:
        top_k_index: (T, k), experts of the whole group: process r holds those from ``r * num_local_experts`` on. T may
            differ between the processes, and be 0.
        num_local_experts: Experts per process.
        group: The process group.
    """
    size = group.size()
    rows = sort_by_expert(top_k_index, num_local_experts * size)
    counts = rows.offsets.diff()  # rows of each expert
    parts = [num_local_experts] * size
    arriving = _all_to_all(counts, parts, parts, group.group_name).view(size, num_local_experts)
    sizes = torch.stack([counts.view(size, num_local_experts).sum(1), arriving.sum(1)])
    send_sizes, recv_sizes = sizes.tolist()  # the host sync
    experts = torch.arange(num_local_experts, device=counts.device).repeat(size)
    local_ids = experts.repeat_interleave(arriving.reshape(-1), output_size=sum(recv_sizes))
    return Exchange(rows, top_k_index.shape[1], send_sizes, recv_sizes, local_ids.unsqueeze(1), group.group_name)


def send(hidden: torch.Tensor, top_k_weights: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
    """Sends every choice of this process to the process of its expert.

    Args:
        hidden: (T, H).
        top_k_weights: (T, k).
        exchange: The plan for these tokens.

    Returns:
        The received rows, (R', H), process by process and sorted by expert within each, and their weights, (R', 1).
    """
    return _send(hidden, top_k_weights, list(exchange.rows), exchange.send_sizes, exchange.recv_sizes, exchange.group)


def bring_back(y: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Sends the results back to the processes of their tokens, and sums those of each token.

    Args:
        y: (R', H), the experts' weighted results for the rows that `send` returned.
        exchange: The plan given to `send`.

    Returns:
        (T, H) in y's dtype.
    """
    operands = y, list(exchange.rows), exchange.top_k, exchange.send_sizes, exchange.recv_sizes, exchange.group
    return _bring_back(_bring_back_save(*operands), *operands)


def _all_to_all(x: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], group: str) -> torch.Tensor:
    """`x` exchanged along its first dimension."""
    collectives = torch.ops._c10d_functional  # the ones that torch.compile can trace
    return collectives.wait_tensor(
        collectives.all_to_all_single(x.contiguous(), list(output_sizes), list(input_sizes), group)
    )


@operator("liger_trainer::expert_send")
def _send(
    hidden: torch.Tensor,
    top_k_weights: torch.Tensor,
    expert_rows: Sequence[torch.Tensor],
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    group: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`send`; here and below, `expert_rows` are the tensors of an `ExpertRows`."""
    order = ExpertRows(*expert_rows).order
    rows = hidden.index_select(0, order // top_k_weights.shape[1])
    weights = top_k_weights.reshape(-1, 1).index_select(0, order)
    return _all_to_all(rows, recv_sizes, send_sizes, group), _all_to_all(weights, recv_sizes, send_sizes, group)


@_send.register_fake
def _(hidden, top_k_weights, expert_rows, send_sizes, recv_sizes, group):
    arriving = sum(recv_sizes)
    return hidden.new_empty(arriving, hidden.shape[1]), top_k_weights.new_empty(arriving, 1)


@operator("liger_trainer::expert_send_backward")
def _send_backward(
    drows: torch.Tensor,
    dweights: torch.Tensor,
    expert_rows: Sequence[torch.Tensor],
    top_k: int,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    group: str,
    need_hidden: bool,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of hidden and of the weights; one that is not needed has no elements and sends nothing."""
    rows = ExpertRows(*expert_rows)
    dhidden, dtop_k = drows.new_empty(0), dweights.new_empty(0)
    if need_hidden:
        dhidden = combine_rows(_all_to_all(drows, send_sizes, recv_sizes, group), rows, top_k)
    if need_weights:
        weights = _all_to_all(dweights, send_sizes, recv_sizes, group)
        dtop_k = weights.index_select(0, rows.slots).view(-1, top_k)
    return dhidden, dtop_k


@_send_backward.register_fake
def _(drows, dweights, expert_rows, top_k, send_sizes, recv_sizes, group, need_hidden, need_weights):
    tokens = expert_rows[0].shape[0] // top_k
    return (
        drows.new_empty((tokens, drows.shape[1]) if need_hidden else 0),
        dweights.new_empty((tokens, top_k) if need_weights else 0),
    )


refuse_second_derivative(_send_backward, _FUNCTION)


def _setup_send(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, top_k_weights, expert_rows, *ctx.way = inputs
    ctx.top_k = top_k_weights.shape[1]
    ctx.save_for_backward(*expert_rows)


def _backward_send(ctx: Any, drows: torch.Tensor, dweights: torch.Tensor) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[:2]
    gradients = _send_backward(drows, dweights, list(ctx.saved_tensors), ctx.top_k, *ctx.way, *needed)
    return input_gradients(ctx, *where_needed(needed, *gradients))


_send.register_autograd(_backward_send, setup_context=_setup_send, materialize_grads=True)


def _placeholder(
    y: torch.Tensor,
    expert_rows: Sequence[torch.Tensor],
    top_k: int,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    group: str,
) -> torch.Tensor:
    """A placeholder for the output, whose gradient it sends to the results: zeros (T, H) that share one element."""
    return y.new_zeros(()).expand(expert_rows[0].shape[0] // top_k, y.shape[1])


_bring_back_save = operator("liger_trainer::expert_bring_back_save")(_placeholder)
_bring_back_save.register_fake(_placeholder)


@operator("liger_trainer::expert_bring_back_backward")
def _bring_back_backward(
    dout: torch.Tensor,
    order: torch.Tensor,
    top_k: int,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    group: str,
) -> torch.Tensor:
    """The gradient of the results, (R', H), from that of the output."""
    return _all_to_all(dout.index_select(0, order // top_k), recv_sizes, send_sizes, group)


@_bring_back_backward.register_fake
def _(dout, order, top_k, send_sizes, recv_sizes, group):
    return dout.new_empty(sum(recv_sizes), dout.shape[1])


refuse_second_derivative(_bring_back_backward, _FUNCTION)


def _setup_bring_back(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, expert_rows, *ctx.way = inputs
    ctx.save_for_backward(ExpertRows(*expert_rows).order)


def _backward_bring_back(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
    (order,) = ctx.saved_tensors
    return input_gradients(ctx, _bring_back_backward(dout, order, *ctx.way))


_bring_back_save.register_autograd(_backward_bring_back, setup_context=_setup_bring_back, materialize_grads=True)


@operator("liger_trainer::expert_bring_back")
def _bring_back(
    placeholder: torch.Tensor,
    y: torch.Tensor,
    expert_rows: Sequence[torch.Tensor],
    top_k: int,
    send_sizes: Sequence[int],
    recv_sizes: Sequence[int],
    group: str,
) -> torch.Tensor:
    """The output (T, H), whose gradient goes to `placeholder`."""
    return combine_rows(_all_to_all(y, send_sizes, recv_sizes, group), ExpertRows(*expert_rows), top_k)


@_bring_back.register_fake
def _(placeholder, y, expert_rows, top_k, send_sizes, recv_sizes, group):
    return y.new_empty(placeholder.shape)


pass_to_placeholder(_bring_back)
