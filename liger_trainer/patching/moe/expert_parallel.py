"""Experts that transformers has split over processes: the exchange of their tokens and results.

`DistributedConfig(ep_size=...)` keeps whole experts on each process, as DTensors, and gives their module a forward that
receives tokens from the other processes. In training that is an all-to-all, which ours replaces
(`parallel/expert_exchange.py`). The experts themselves run as usual, on rows with one expert each.

Nothing is proved on a dummy module, since that would take all processes;
`tests/distributed/test_expert_parallel.py` compares.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.private import available
from liger_trainer.compat.transformers import EXPERT_EXCHANGE
from liger_trainer.kernels.runtime import as_autocast, local_part
from liger_trainer.parallel.expert_exchange import bring_back, plan_exchange, send
from liger_trainer.patching.binding import bind_forward
from liger_trainer.patching.report import SWITCHED_OFF, Finding


def find_expert_exchange(module: nn.Module, enabled: Callable[[str], bool]) -> Finding | None:
    """The finding for the exchange of tokens between processes in `module`; None without an all-to-all."""
    receives = receives_tokens(module)
    if not receives and not getattr(module, "_is_expert_parallel", False):
        return None
    if not available(EXPERT_EXCHANGE) or not receives:  # transformers 5.22 splits experts in another way
        return None
    held = held_by_exchange(module)
    if held is None:
        return None
    way, forward = held["implementation"], module.__dict__["forward"]
    target = f"{type(module).__name__} of {way.ep_mesh.size()} processes"
    if not enabled("experts"):
        return Finding("experts", target, module, reason=SWITCHED_OFF)
    bind = functools.partial(bind_forward, over=forward)
    return Finding("experts", target, module, "expert exchange", _exchanging(held, forward), bind=bind)


def receives_tokens(module: nn.Module) -> bool:
    """Whether transformers has given `module` a forward that receives tokens from other processes."""
    library: Any = sys.modules.get("transformers.distributed.expert_parallel")
    forward: Any = module.__dict__.get("forward")
    return library is not None and inspect.isfunction(forward) and forward.__globals__ is vars(library)


def held_by_exchange(module: nn.Module) -> Mapping[str, Any] | None:
    """What the forward of [`receives_tokens`] holds: the names of its closure; None for another than an all-to-all."""
    library: Any = sys.modules["transformers.distributed.expert_parallel"]
    held = inspect.getclosurevars(module.__dict__["forward"]).nonlocals
    way: Any = held.get("implementation")
    if type(way) not in (library.AutoEP, library.AllToAllEP) or getattr(way, "megamoe", None) is not None:
        return None
    return held if {"self", "ep_mesh"} <= held.keys() else None


def run_exchanged(
    experts: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    num_local_experts: int,
    group: Any,
) -> torch.Tensor:
    """The weighted sum of each token's experts, on any process of `group`.

    Every process calls it at the same time, with its own tokens. The gradient of an expert is the sum over the tokens
    of all processes; where other gradients are averaged over the processes, the caller has to divide it.

    Args:
        experts: Maps rows (R', H), experts of this process (R', 1) and weights (R', 1) to weighted results (R', H).
        hidden: (T, H); T may differ between the processes, and be 0.
        top_k_index: (T, k), experts of the group: process r holds those from ``r * num_local_experts`` on.
        top_k_weights: (T, k).
        num_local_experts: Experts of this process, as many as of every other one.
        group: The process group.

    Returns:
        (T, H), in the dtype of the results.
    """
    exchange = plan_exchange(top_k_index, num_local_experts, group)
    rows, weights = send(as_autocast(hidden), top_k_weights, exchange)  # send no wider dtype than the products use
    ids = exchange.local_ids
    if len(rows) == 0:  # a row of zeros, so that the weights get a gradient and FSDP can reduce it
        rows, weights = rows.sum(0, keepdim=True), weights.sum(0, keepdim=True)
        return bring_back(experts(rows, ids.new_zeros(1, 1), weights)[:0], exchange)
    return bring_back(experts(rows, ids, weights), exchange)


def _exchanging(held: Mapping[str, Any], original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A forward to replace transformers' `original`, whose closure holds the names `held`."""
    way, style, ep_mesh = held["implementation"], held["self"], held["ep_mesh"]
    # If all processes have the same tokens, transformers' own evaluation needs no sizes, and no sync to read them.
    evaluates_alone = getattr(way, "all_reduce", None) is not None

    def forward(
        self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        hidden_states, top_k_weights = map(local_part, (hidden_states, top_k_weights))
        if evaluates_alone and not (torch.is_grad_enabled() and hidden_states.requires_grad):
            return original(hidden_states, top_k_index, top_k_weights)
        tokens = len(hidden_states)
        hidden, index, weights = _own_tokens(way.tp_mesh, hidden_states, top_k_index, top_k_weights)
        with style.context_around_forward(self, ep_mesh):
            output = run_exchanged(
                way.experts_forward, hidden, index, weights, way.num_local_experts, way.ep_mesh.get_group()
            )
        return _tokens_of_all(way.tp_mesh, output, tokens).to(hidden_states.dtype)

    return forward


def _own_tokens(mesh: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """This process's share of the tokens that a tensor-parallel group shares; their gradients are gathered."""
    if mesh.size() == 1:
        return list(tensors)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    whole = (DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in tensors)
    return [tensor.redistribute(mesh, [Shard(0)]).to_local() for tensor in whole]


def _tokens_of_all(mesh: Any, own: torch.Tensor, tokens: int) -> torch.Tensor:
    """The inverse of `_own_tokens`, for the results of a group's `tokens`."""
    if mesh.size() == 1:
        return own
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((tokens, own.shape[1]))
    parts = DTensor.from_local(own.contiguous(), mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return parts.full_tensor()
