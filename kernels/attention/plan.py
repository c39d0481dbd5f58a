"""Which keys each query sees, in place of a mask of queries by keys.

Shapes: batch sequences of length tokens, K keys of all documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.copied_rows import Copies


class SharedKeys(NamedTuple):
    """The keys of documents whose queries also see tokens of another document: completions that see their prompt.

    Attributes:
        copies: The tokens that the K keys of all documents are copies of. A document's last keys are its own tokens.
        offsets: int32 (documents + 1,), where the keys of each document begin, and K.
        longest: At least the number of keys of the document with most.
    """

    copies: Copies
    offsets: torch.Tensor
    longest: int


class AttentionPlan(NamedTuple):
    """Causal attention inside documents.

    The tokens of all rows, one row after the other, are cut into documents, and a token sees those before it in its
    document and itself. So packed rows, padding (a document of its own) and chunks need no mask. A tuple of numbers and
    tensors, it travels through layers, checkpoints and compiled graphs in the mask's place.

    With `keys`, documents may have more keys than queries. The last query is at the position of the last key: query i
    of n sees the key j of m if j <= i + m - n and, with a window, j > i + m - n - window.

    Attributes:
        window: How many keys a query sees at most, itself included; 0 for all in its document.
        offsets: int32 (documents + 1,), where documents begin, and the number of tokens; None if rows are documents.
        longest: At least the length of the longest document.
        whole_rows: Whether rows without `offsets` are known to be documents; else `position_ids` may tell of packing.
        keys: The keys of the documents, if they are not just their tokens. Needs `offsets`, and documents of one token
            or more.
    """

    window: int
    offsets: torch.Tensor | None
    longest: int
    whole_rows: bool = False
    keys: SharedKeys | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions of the mask that a plan replaces: transformers' `generate` asks for it."""
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
        batch: Number of rows; 1 for a plan with `keys`.
        length: Tokens of each row.
        device: Device of the result.

    Returns:
        bool (batch, 1, length, length), or (1, 1, length, length) if it is the same in all rows.

    Raises:
        ValueError: for several rows of a plan with `keys`.
    """
    if plan.keys is not None:
        assert plan.offsets is not None
        return _dense_shared(plan.offsets, plan.keys, plan.window, batch, length, device)
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


def _dense_shared(
    offsets: torch.Tensor, keys: SharedKeys, window: int, batch: int, length: int, device: torch.device
) -> torch.Tensor:
    if batch != 1:
        raise ValueError(f"`batch` is {batch}; a plan with `keys` is for one row, so put all tokens into one.")
    index = keys.copies.index.to(device)

    def places(count: int, offsets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The document of each, and its position before the document's end, where queries and keys meet."""
        ends = offsets[1:].to(device)
        places = torch.arange(count, device=device, dtype=torch.int32)
        document = torch.bucketize(places, ends, right=True)
        return document, places - ends[document]

    document, query = places(length, offsets)
    of, key = places(len(index), keys.offsets)
    distance = query[:, None] - key
    seen = (document[:, None] == of) & (distance >= 0)
    if window:
        seen = seen & (distance < window)
    times = torch.zeros(length, length, dtype=torch.uint8, device=device).index_add(1, index, seen.to(torch.uint8))
    return times.bool()[None, None]
