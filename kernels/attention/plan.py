"""Which keys each query sees, in place of a mask of queries by keys.

Shapes: batch sequences of length tokens, K keys of all documents; words of 32 keys of a document.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from liger_trainer.kernels.copied_rows import Copies
from liger_trainer.kernels.runtime import cdiv

BLOCK = 512
"""Queries whose mask is built at a time, where a selection is made or read."""


FILLED_BOUNDS = 32
"""Bounds of documents are filled up to a multiple of it where few shapes are to occur, as in CUDA graphs."""


class SharedKeys(NamedTuple):
    """The keys of documents that have more of them than queries.

    Completions see their prompt, a document of its own; and where only the last tokens of documents are queries, they
    see those before them.

    Attributes:
        copies: The tokens that the K keys of all documents are copies of. A document's last keys are its own tokens.
            None if the keys are all tokens of all rows, one row after the other.
        offsets: int32 (documents + 1,), where the keys of each document begin, and K.
        longest: At least the number of keys of the document with most.
        ranks: Over how many processes the tokens of the rows are spread; 1 if this process has all.
        group: The name of the group of these processes, whose keys are gathered: `copies` are then of the tokens of
            all, those of the first process first (`gathered_keys.py`).
    """

    copies: Copies | None
    offsets: torch.Tensor
    longest: int
    ranks: int = 1
    group: str = ""


class Ranks(NamedTuple):
    """The processes that have parts of the same rows.

    Attributes:
        rank: The number of this one among them.
        ranks: How many they are, at least 2.
        group: The name of their group.
        option: The size of the launch that spreads the rows. With `sp_size` a process has one part of each row, and
            heads are exchanged; with `cp_size` it has two, and keys are gathered.
    """

    rank: int
    ranks: int
    group: str
    option: str = "cp_size"


class AttentionPlan(NamedTuple):
    """Causal attention inside documents.

    The tokens of all rows, one row after the other, are cut into documents, and a token sees those before it in its
    document and itself. So packed rows, padding (a document of its own) and chunks need no mask. A tuple of numbers and
    tensors, it travels through layers, checkpoints and compiled graphs in the mask's place.

    With `keys`, documents may have more keys than queries. The last query is at the position of the last key: query i
    of n sees the key j of m if j <= i + m - n and, with a window, j > i + m - n - window. The tokens of the queries are
    then those of `offsets`, in one row, and may be fewer than those that the keys are of.

    Attributes:
        window: How many keys a query sees at most, itself included; 0 for all in its document.
        offsets: int32 (documents + 1,), where documents begin, and the number of tokens; None if rows are documents.
        longest: At least the length of the longest document.
        whole_rows: Whether rows without `offsets` are known to be documents; else `position_ids` may tell of packing.
        keys: The keys of the documents, if they are not just their tokens. Needs `offsets`, and documents of one token
            or more.
        bits: int32 (words, tokens), the keys that were selected for each query, such as those of an indexer; None for
            all. A query t sees the key at position 32 w + b of its document only if bit b of bits[w, t] is set.
        exchanged: The processes that have parts of the rows, which are whole in this plan, and exchange heads
            (`exchanged_heads.py`); None if this one has the rows.
    """

    window: int
    offsets: torch.Tensor | None
    longest: int
    whole_rows: bool = False
    keys: SharedKeys | None = None
    bits: torch.Tensor | None = None
    exchanged: Ranks | None = None

    @property
    def ndim(self) -> int:
        """The number of dimensions of the mask that a plan replaces: transformers' `generate` asks for it."""
        return 4

    def contiguous(self) -> AttentionPlan:
        """Itself: `generate` asks for this too."""
        return self

    @property
    def spread(self) -> str:
        """The size by which a launch spreads the tokens of the rows over processes; empty if it does not."""
        if self.exchanged is not None:
            return self.exchanged.option
        return "cp_size" if self.keys is not None and self.keys.ranks > 1 else ""

    @property
    def masks_nothing(self) -> bool:
        """Whether this is plain causal attention of every row."""
        return self.window == 0 and self.offsets is None and self.bits is None

    def longest_keys(self, length: int) -> int:
        """At least the number of keys of the document with most, in rows of so many tokens."""
        if self.offsets is None:
            return length
        return self.longest if self.keys is None else self.keys.longest


def dense(
    plan: AttentionPlan,
    batch: int,
    length: int,
    device: torch.device,
    tokens: int | None = None,
    rows: slice = slice(None),
) -> torch.Tensor:
    """The plan as a mask, True where a query (dimension 2) sees a key (dimension 3).

    Args:
        plan: The plan.
        batch: Number of rows; 1 for a plan with `keys`.
        length: Tokens of each row.
        device: Device of the result.
        tokens: How many tokens the keys of a plan with `keys` are of; `length` by default.
        rows: Which queries of each row the result is for; all by default.

    Returns:
        bool (batch, 1, queries, length), or (1, 1, queries, length) if it is the same in all rows; (1, 1, queries,
        tokens) with `keys`.

    Raises:
        ValueError: for several rows of a plan with `keys`.
    """
    if plan.bits is not None and rows == slice(None):  # whose places are numbers of 64 bits
        blocks = (slice(start, start + BLOCK) for start in range(0, length, BLOCK))
        return torch.cat([dense(plan, batch, length, device, tokens, each) for each in blocks], 2)
    if plan.keys is not None:
        assert plan.offsets is not None
        return _dense_shared(
            plan, plan.offsets, plan.keys, batch, length, device, rows, length if tokens is None else tokens
        )
    position = torch.arange(length, device=device)
    distance = position[rows, None] - position
    mask = distance >= 0
    if plan.window:
        mask = mask & (distance < plan.window)
    mask = mask[None, None]
    if plan.offsets is None and plan.bits is None:
        return mask
    place = torch.arange(batch * length, device=device, dtype=torch.int32).view(batch, 1, length)
    begins = place[..., :1].expand_as(place)
    if plan.offsets is not None:
        offsets = plan.offsets.to(device)
        document = torch.bucketize(place, offsets, right=True)
        mask = mask & (document[:, :, rows, None] == document[:, :, None, :])
        begins = offsets[document - 1]
    if plan.bits is not None:
        mask = mask & _is_set(plan.bits, place[:, :, rows, None], place[:, :, None] - begins[:, :, rows, None])
    return mask


def _dense_shared(
    plan: AttentionPlan,
    offsets: torch.Tensor,
    keys: SharedKeys,
    batch: int,
    length: int,
    device: torch.device,
    rows: slice,
    tokens: int,
) -> torch.Tensor:
    if batch != 1:
        raise ValueError(f"`batch` is {batch}; a plan with `keys` is for one row, so put all tokens into one.")
    copies = keys.copies
    found = []
    for count, begins in ((length, offsets), (tokens if copies is None else len(copies.index), keys.offsets)):
        # The document of each, and its position before the document's end, where queries and keys meet.
        ends = begins[1:].to(device)
        places = torch.arange(count, device=device, dtype=torch.int32)
        document = torch.bucketize(places, ends, right=True)
        found.append((document, places - ends[document]))
    (document, query), (of, key) = found
    document, query = document[rows], query[rows]
    distance = query[:, None] - key
    seen = (document[:, None] == of) & (distance >= 0)
    if plan.window:
        seen = seen & (distance < plan.window)
    if plan.bits is not None:
        counts = keys.offsets.diff().to(device)
        queries = torch.arange(length, device=device)[rows, None]
        seen = seen & _is_set(plan.bits, queries, (key + counts[of]).expand(len(query), -1))
    if copies is None:
        return seen[None, None]
    times = torch.zeros(len(query), tokens, dtype=torch.uint8, device=device)
    return times.index_add(1, copies.index.to(device), seen.to(torch.uint8)).bool()[None, None]


def _is_set(bits: torch.Tensor, query: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Whether the bits of these queries are set at these positions of their documents; anything at no position."""
    words = bits.to(place.device)[(place >> 5).clamp(0, len(bits) - 1).long(), query.long()]
    return (words >> (place & 31)) & 1 != 0


def bits_of(plan: AttentionPlan, indices: torch.Tensor, length: int, first: int = 0) -> torch.Tensor:
    """The `bits` of a plan for selected keys, without those that `plan` does not let a query see.

    Args:
        plan: The plan. Its window plays no part.
        indices: int (batch, queries, selected), the tokens of the row that are selected for each query. The order does
            not matter.
        length: Tokens of each row.
        first: The first query's token in the row.

    Returns:
        int32 (words, batch, queries), words for the keys of the longest document.
    """
    batch, queries, _ = indices.shape
    if queries > BLOCK:
        starts = range(0, queries, BLOCK)
        return torch.cat([bits_of(plan, indices[:, each : each + BLOCK], length, first + each) for each in starts], 2)
    device = indices.device
    selected = torch.zeros(batch, queries, length, dtype=torch.bool, device=device)
    selected.scatter_(-1, indices.long(), True)

    base, position = places_of(plan, batch, length, first, queries, device)
    words = cdiv(plan.longest_keys(length), 32)
    place = torch.arange(32 * words, device=device)
    if plan.offsets is None:
        selected = F.pad(selected, (0, 32 * words - length))
    else:
        index = base[..., None] + place
        if plan.keys is not None:
            assert plan.keys.copies is not None
            copies = plan.keys.copies.index.to(device)
            index = copies[index.clamp(max=len(copies) - 1)].long()
        selected = selected.gather(-1, index.clamp(max=length - 1))
    selected = selected & (place <= position[..., None])
    powers = 2 ** torch.arange(8, dtype=torch.uint8, device=device)
    in_bytes = (selected.view(batch, queries, 4 * words, 8) * powers).sum(-1, dtype=torch.uint8)
    return in_bytes.view(torch.int32).movedim(-1, 0).contiguous()


def places_of(
    plan: AttentionPlan, batch: int, length: int, first: int, queries: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the keys are that a block of queries sees.

    Args:
        plan: The plan. Its window plays no part.
        batch: Number of rows; 1 for a plan with `keys`.
        length: Tokens of each row.
        first: The first query's token in the row.
        queries: How many there are.
        device: Device of the results.

    Returns:
        int (batch, queries): where the keys of the query's document begin, in its row or, with `keys`, among the keys
        of all documents; and how many of these keys come before the query's own.
    """
    rows = torch.arange(batch, device=device)[:, None] * length
    token = rows + torch.arange(first, first + queries, device=device)
    if plan.offsets is None:
        return torch.zeros_like(token), token - rows
    offsets = plan.offsets.to(device)
    document = torch.bucketize(token, offsets, right=True) - 1
    base, position = offsets[document], token - offsets[document]
    if plan.keys is None:
        return base - rows, position
    keys = plan.keys.offsets.to(device)
    return keys[document], position + (keys - offsets).diff()[document]
