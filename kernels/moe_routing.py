"""Which rows belong to which expert: a stable counting sort of the choices of a router."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertRows(NamedTuple):
    """The choices of T tokens, k each, in the order of their experts; what every grouped kernel takes.

    Args:
        order: int32 (T * k,); the flat index ``t * k + j`` of each row. Rows of one expert lie together, in the order
            of their tokens.
        slots: int32 (T * k,); the row of each flat index.
        offsets: int32 (E + 1,); the first row of each expert, and the number of rows that have one.
    """

    order: torch.Tensor
    slots: torch.Tensor
    offsets: torch.Tensor


def sort_by_expert(top_k_index: torch.Tensor, num_experts: int) -> ExpertRows:
    """The rows of each expert."""
    ids = top_k_index.reshape(-1).long()
    order = torch.argsort(ids, stable=True)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=ids.device)
    counts = torch.bincount(ids.clamp(max=num_experts), minlength=num_experts + 1)[:num_experts]
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    offsets[1:] = counts.cumsum(0)
    return ExpertRows(order.int(), slots.int(), offsets)


def tile_table(offsets: torch.Tensor, block_rows: int, num_rows: int) -> torch.Tensor:
    """int32 (ceil(num_rows / block_rows) + E, 2): expert and first row of each tile, expert -1 past the end."""
    counts = offsets[1:] - offsets[:-1]
    tiles = (counts + block_rows - 1) // block_rows
    ends = tiles.cumsum(0)
    index = torch.arange(-(-num_rows // block_rows) + len(counts), device=offsets.device)
    expert = torch.searchsorted(ends, index, right=True)
    inside = expert < len(counts)
    clamped = expert.clamp(max=len(counts) - 1)
    first = offsets[clamped] + (index - (ends[clamped] - tiles[clamped])) * block_rows
    return torch.stack((torch.where(inside, clamped, -1), first), 1).int()
