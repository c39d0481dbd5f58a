"""Which keys each query sees, in place of a mask of queries by keys."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionPlan(NamedTuple):
    """Causal attention inside documents, with as many queries as keys.

    The tokens of all rows, one row after the other, are cut into documents, and a token sees those before it in its
    document and itself. So packed rows, padding (a document of its own) and chunks need no mask. A tuple of numbers and
    a tensor, it travels through layers, checkpoints and compiled graphs in the mask's place.

    Attributes:
        window: How many keys a query sees at most, itself included; 0 for all in its document.
        offsets: int32 (documents + 1,), where documents begin, and the number of tokens; None if rows are documents.
        longest: At least the length of the longest document.
        whole_rows: Whether rows without `offsets` are known to be documents; else `position_ids` may tell of packing.
    """

    window: int
    offsets: torch.Tensor | None
    longest: int
    whole_rows: bool = False

    @property
    def ndim(self) -> int:
        """That of the mask in whose place it stands: transformers' `generate` asks for it."""
        return 4

    def contiguous(self) -> AttentionPlan:
        """Itself: `generate` asks for this too."""
        return self

    @property
    def masks_nothing(self) -> bool:
        """Whether this is plain causal attention of every row."""
        return self.window == 0 and self.offsets is None


def dense(plan: AttentionPlan, batch: int, length: int, device: torch.device) -> torch.Tensor:
    """The plan as a mask, True where a query (dimension 2) sees a key (dimension 3).

    Args:
        plan: The plan.
        batch: Number of rows.
        length: Of each row.
        device: Of the result.

    Returns:
        bool (batch, 1, length, length), or (1, 1, length, length) if it is the same in all rows.
    """
    position = torch.arange(length, device=device)
    distance = position[:, None] - position
    mask = distance >= 0
    if plan.window:
        mask = mask & (distance < plan.window)
    mask = mask[None, None]
    if plan.offsets is None:
        return mask
    tokens = torch.arange(batch * length, device=device, dtype=torch.int32)
    document = torch.bucketize(tokens, plan.offsets.to(device), right=True).view(batch, length)
    return mask & (document[:, None, :, None] == document[:, None, None, :])
