"""Rows whose tokens are spread over processes: which tokens each has, and which keys these see.

Under context parallelism a row is cut into 2R chunks for R processes. Process r has chunks r and 2R - 1 - r, one behind
the other, so that all have about as many pairs of queries and keys. Keys are gathered
(`kernels/attention/gathered_keys.py`). The queries of a chunk see a slice of them: from the beginning of the document
that reaches into the chunk, or a window before the chunk, to its end. Each document in a chunk is thus whole but for
the first, whose queries are at its end. An `AttentionPlan` with `SharedKeys` says that of all chunks at once; its
copies bring the gathered keys into their order, too.

Under sequence parallelism (Ulysses) process r has the r-th of R parts of each row, and attends with some heads to whole
rows (`kernels/attention/exchanged_heads.py`). `Ranks.option` says which of the two it is.

Shapes: B rows of S tokens, R processes; S is a multiple of 2R, or of R under sequence parallelism.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import COLLECTIVES
from liger_trainer.kernels.attention.plan import AttentionPlan, Ranks, SharedKeys
from liger_trainer.kernels.copied_rows import Copies, copies_of
from liger_trainer.kernels.runtime import sent


def _chunks_of(columns: torch.Tensor, rank: int, ranks: Ranks) -> tuple[torch.Tensor, ...]:
    """The chunks of the last dimension that a process has, as views."""
    if ranks.option == "sp_size":
        return (columns.chunk(ranks.ranks, -1)[rank],)
    chunks = columns.chunk(2 * ranks.ranks, -1)
    return chunks[rank], chunks[-1 - rank]


def columns_of(ranks: Ranks, length: int) -> torch.Tensor:
    """int64 (S / R,), on the CPU: the tokens of a row of `length` that this process has."""
    return torch.cat(_chunks_of(torch.arange(length), ranks.rank, ranks))


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceParts:
    """The parts of some rows, of equal lengths, and the attention of this process's tokens.

    Args:
        ranks: The processes.
        begins: For each row where its documents begin, the first at 0, in order. Padding may be documents of its own.
        length: S.
        device: Where plans are to be.
        plans: Plans that were asked for, by window and chunk size.
    """

    ranks: Ranks
    begins: Sequence[Sequence[int]]
    length: int
    device: torch.device
    plans: dict[tuple[int, int], AttentionPlan] = dataclasses.field(default_factory=dict)

    def plan(self, window: int, chunk: int) -> AttentionPlan:
        """The plan of this process's tokens, (B, S / R), that see `window` keys, in chunks of a document; 0 for all."""
        if (window, chunk) not in self.plans:
            self.plans[window, chunk] = self._plan(window, chunk)
        return self.plans[window, chunk]

    def _plan(self, window: int, chunk: int) -> AttentionPlan:
        queries, keys = [0], [0]
        pieces: list[torch.Tensor] = []
        places = self._places()
        for row in range(len(self.begins)):
            for first, begin, end in self._documents(row, chunk):
                seen = max(first, begin - window + 1) if window else first
                pieces.append(places[row, seen:end])
                queries.append(queries[-1] + end - begin)
                keys.append(keys[-1] + end - seen)
        copies = copies_of(torch.cat(pieces), places.numel())
        longest, most = (max(b - a for a, b in itertools.pairwise(each)) for each in (queries, keys))
        offsets, key_offsets = (sent(torch.tensor(each, dtype=torch.int32), self.device) for each in (queries, keys))
        moved = Copies(*(sent(each, self.device) for each in copies))
        shared = SharedKeys(moved, key_offsets, most, self.ranks.ranks, self.ranks.group)
        return AttentionPlan(window if window < most else 0, offsets, longest, keys=shared)

    def _documents(self, row: int, chunk: int) -> Iterator[tuple[int, int, int]]:
        """The first token of each document with tokens here, where those begin, and where they end, in their order."""
        begins = self.begins[row]
        size = self.length // (2 * self.ranks.ranks)
        for number in (self.ranks.rank, 2 * self.ranks.ranks - 1 - self.ranks.rank):
            start, stop = number * size, (number + 1) * size
            at = bisect.bisect_right(begins, start) - 1
            for first, behind in itertools.pairwise((*begins[at : bisect.bisect_left(begins, stop)], self.length)):
                yield from _cut(first, max(first, start), min(behind, stop), chunk)

    def _places(self) -> torch.Tensor:
        """(B, S), where each token is among the gathered ones: of process 0 the rows one after the other, and so on."""
        rows, columns = len(self.begins), self.length // self.ranks.ranks
        places = torch.empty(rows, self.length, dtype=torch.int64)
        of_all = torch.arange(places.numel()).view(self.ranks.ranks, rows, columns)
        for rank, of_rank in enumerate(of_all):
            places[:, columns_of(self.ranks._replace(rank=rank), self.length)] = of_rank
        return places


class SequenceHeads(SequenceParts):
    """Rows of which every process has a part, in order, and attends with some heads to all tokens."""

    def _plan(self, window: int, chunk: int) -> AttentionPlan:
        offsets = [0]
        for row, firsts in enumerate(self.begins):
            for first, behind in itertools.pairwise((*firsts, self.length)):
                offsets += [row * self.length + end for _, _, end in _cut(first, first, behind, chunk)]
        longest = max(b - a for a, b in itertools.pairwise(offsets))
        begins = sent(torch.tensor(offsets, dtype=torch.int32), self.device)
        return AttentionPlan(window if window < longest else 0, begins, longest, exchanged=self.ranks)


def _cut(first: int, begin: int, end: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """The tokens `begin` to `end` of a document that begins at `first`, cut where its chunks begin; 0 for none."""
    while chunk and begin < end:
        first += (begin - first) // chunk * chunk
        behind = min(first + chunk, end)
        yield first, begin, behind
        begin = behind
    if begin < end:
        yield first, begin, end


class _GatheredColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        ctx.ranks = ranks
        length = part.shape[-1] * ranks.ranks
        collectives = torch.ops._c10d_functional
        everyone = collectives.all_gather_into_tensor(part.contiguous(), ranks.ranks, ranks.group)
        parts = collectives.wait_tensor(everyone).view(ranks.ranks, *part.shape)
        whole = part.new_empty(*part.shape[:-1], length)
        for rank, of_rank in enumerate(parts):
            chunks = _chunks_of(whole, rank, ranks)
            for chunk, columns in zip(chunks, of_rank.chunk(len(chunks), -1)):
                chunk.copy_(columns)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ranks: Ranks = ctx.ranks
        parts = torch.cat([torch.cat(_chunks_of(grad, rank, ranks), -1) for rank in range(ranks.ranks)])
        collectives = torch.ops._c10d_functional
        mine = collectives.reduce_scatter_tensor(parts, "sum", ranks.ranks, ranks.group)
        return collectives.wait_tensor(mine), None


def gathered_columns(part: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The columns of whole rows, of which each process has a part; the gradient is the sum of all processes'.

    Where every process computes the same loss of the whole rows, the gradient of its own part is thus R times that of
    the loss. FSDP, DDP and ZeRO-3 take the mean over the processes, in which each token is in one part: R / R. ZeRO-2
    and below take the sum, for which the loss's own gradient has to be divided by R.

    Args:
        part: (N, ..., S / R), what this process has of its columns, in fp32.
        ranks: The processes.

    Returns:
        (N, ..., S).
    """
    require(COLLECTIVES)
    return _GatheredColumns.apply(part, ranks)
