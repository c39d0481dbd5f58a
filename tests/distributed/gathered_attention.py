"""Attention over a sequence that is spread over gloo processes: exact, by gathering keys and values.

torch's own ring attention runs on GPUs only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

_attention = F.scaled_dot_product_attention


class _Gathered(torch.autograd.Function):
    """The parts of all processes, one after the other along dimension 2; the gradients of all reach each part."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def head_and_tail(rank: int, length: int) -> torch.Tensor:
    """The positions of torch's context parallelism: a part from the start and its mirror from the end."""
    parts = torch.arange(length).chunk(2 * dist.get_world_size())
    return torch.cat([parts[rank], parts[-1 - rank]])


def in_order(rank: int, length: int) -> torch.Tensor:
    """The positions of Ulysses' sequence parallelism: one part after the other."""
    return torch.arange(length).chunk(dist.get_world_size())[rank]


@contextlib.contextmanager
def gathered_attention(positions: Callable[[int, int], torch.Tensor] = head_and_tail) -> Iterator[None]:
    """Inside, causal attention is over the sequence of all processes.

    Args:
        positions: Maps a rank and the length of the whole sequence to where the tokens of the rank are in it.
    """

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **options: Any) -> Any:
        assert not args
        assert options.pop("is_causal")
        assert options.pop("attn_mask", None) is None
        length = query.shape[2] * dist.get_world_size()
        everyone = torch.cat([positions(rank, length) for rank in range(dist.get_world_size())])
        mask = everyone[None, :] <= positions(dist.get_rank(), length)[:, None]
        return _attention(query, _Gathered.apply(key), _Gathered.apply(value), attn_mask=mask, **options)

    replaced = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = replaced
