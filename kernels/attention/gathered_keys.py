"""Keys and values of sequences whose tokens are spread over processes: those of all, gathered.

::

    forward     k, v of all R processes, one after the other       one all-gather of both
    backward    dk, dv of a process = sum over processes of its part       one reduce-scatter, in fp32

Each process computes the gradients of the keys that its own queries see, for every process's tokens. They are added in
fp32 (float64 for float64) and rounded once more, to the dtype of the keys.

Bytes sent and received in bf16 for T tokens of a process, H key heads and D + E columns of a key and its value:
2 (R - 1) T H (D + E) forward, twice that backward. Nothing is saved for the backward.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import COLLECTIVES


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: torch.Tensor, v: torch.Tensor, ranks: int, group: str) -> tuple[torch.Tensor, ...]:
        ctx.ranks, ctx.group = ranks, group
        ctx.tokens, ctx.columns = k.shape[:2], (k.shape[-1], v.shape[-1])
        both = torch.cat([k.flatten(0, 1), v.flatten(0, 1)], -1)
        collectives = torch.ops._c10d_functional
        everyone = collectives.wait_tensor(collectives.all_gather_into_tensor(both, ranks, group))
        return everyone[None].split(ctx.columns, -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        both = torch.cat([dk, dv], -1)[0]
        wide = both.to(torch.promote_types(both.dtype, torch.float32))
        collectives = torch.ops._c10d_functional
        mine = collectives.wait_tensor(collectives.reduce_scatter_tensor(wide, "sum", ctx.ranks, ctx.group))
        dk, dv = mine.to(both.dtype).view(*ctx.tokens, *mine.shape[1:]).split(ctx.columns, -1)
        return dk, dv, None, None


def gathered_keys(k: torch.Tensor, v: torch.Tensor, ranks: int, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of all processes of a group; every one of them has to call this.

    Args:
        k: (batch, seq, key_heads, head_dim), of the same shape and dtype on each process; any strides.
        v: (batch, seq, key_heads, value_dim), in the dtype of `k`.
        ranks: How many processes there are.
        group: The name of their group, its `group_name`.

    Returns:
        (1, ranks * batch * seq, key_heads, head_dim), the tokens of process 0 first, and as much of the values. They
        share one memory, and their last dimension has stride 1.
    """
    require(COLLECTIVES)
    return _Gathered.apply(k, v, ranks, group)
