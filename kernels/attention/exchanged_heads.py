"""Heads of sequences whose tokens are spread over processes: each process gets all tokens of some heads, and back.

::

    forward     q, k, v of R processes, (batch, seq / R, all heads)  ->  (batch, seq, heads / R)    one exchange
                o (batch, seq, heads / R)  ->  (batch, seq / R, all heads)                          one exchange
    backward    the same, the other way round

Process r has the r-th part of each row. Where there are fewer heads of keys than processes, each is sent to as many
processes as share it, and its gradient is the sum of theirs.

Bytes sent in bf16 by a process with T tokens, H heads of queries, G of keys (or R if these are fewer), and D and E
columns of a key and its value: 2 T (R - 1) / R (H (D + E) + G (D + E)) forward, as many backward. Nothing is saved for
the backward. Other ways to spread attention send keys alone (`gathered_keys.py`), which is more where R is large.
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import COLLECTIVES


class _Exchanged(torch.autograd.Function):
    """(R, ...): the r-th of R parts goes to process r, and the r-th that arrives is of process r."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: str) -> torch.Tensor:
        ctx.group = group
        collectives = torch.ops._c10d_functional
        sizes = [1] * len(parts)
        return collectives.wait_tensor(collectives.all_to_all_single(parts.contiguous(), sizes, sizes, group))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _Exchanged.forward(ctx, grad, ctx.group), None


def exchanged_heads(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranks: int, group: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Some heads of the whole rows, of which each process of a group has a part; every one of them has to call this.

    Args:
        q: (batch, seq / ranks, heads, head_dim), of the same shape and dtype on each process; any strides.
        k: (batch, seq / ranks, key_heads, head_dim), in the dtype of `q`.
        v: (batch, seq / ranks, key_heads, value_dim).
        ranks: How many processes there are; they divide `heads`, and `key_heads` or the other way round.
        group: The name of their group, its `group_name`.

    Returns:
        (batch, seq, heads / ranks, head_dim), and the keys and values of these heads; views of one memory.

    Raises:
        ValueError: for numbers of heads that cannot be divided.
    """
    require(COLLECTIVES)
    heads, key_heads = q.shape[2], k.shape[2]
    check_heads(heads, key_heads, ranks)
    if key_heads < ranks:
        k, v = (x.repeat_interleave(ranks // key_heads, 2) for x in (k, v))
    # (batch, seq / ranks, ranks, columns)
    of_ranks = [x.unflatten(2, (ranks, -1)).flatten(3) for x in (q, k, v)]
    arrived = _Exchanged.apply(torch.cat(of_ranks, -1).movedim(2, 0), group)
    whole = arrived.movedim(0, 1).flatten(1, 2)
    columns = whole.split([x.shape[-1] for x in of_ranks], -1)
    q, k, v = (x.unflatten(-1, (-1, of.shape[-1])) for x, of in zip(columns, (q, k, v)))
    return q, k, v


def exchanged_tokens(out: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """All heads of this process's part of the rows, of which each process of a group has some heads.

    Args:
        out: (batch, seq, heads / ranks, value_dim).
        ranks: How many processes there are.
        group: The name of their group.

    Returns:
        A contiguous (batch, seq / ranks, heads, value_dim).
    """
    parts = out.unflatten(1, (ranks, -1)).movedim(1, 0)
    return _Exchanged.apply(parts, group).movedim(0, 2).flatten(2, 3)


def check_heads(heads: int, key_heads: int, ranks: int) -> None:
    """Raises ValueError if so many processes cannot share so many heads."""
    if heads % ranks or (key_heads % ranks and ranks % key_heads):
        raise ValueError(
            f"`sp_size` is {ranks}, and attention has {heads} heads of queries and {key_heads} of keys: it must divide "
            "the first, and divide the second or be a multiple of it. Set another `sp_size`."
        )
