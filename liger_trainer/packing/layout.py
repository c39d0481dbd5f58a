"""What a packed row holds of a padded batch: each token once that no padding hides and that rows do not share.

Rows that begin in the same column share their longest common beginning. A causal model computes the same for it in each
of them, so it is exact to compute it once. What is equal need not be a prompt: the beginnings of answers count too.

Of all ways to group rows, with one shared beginning a group, `_best_groups` finds that with the fewest tokens.
If beginnings of very many lengths are inside each other, only some of the lengths are tried.

All of this is on the host, in numpy.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_LEAST_SAVED = 0.05
"""The least share of all tokens worth sharing: fewer, such as a first token that all rows have, cost more than they
save."""

_MOST_LEVELS = 40
"""The most common beginnings inside each other; the search for the best groups goes through all pairs of levels."""


class Group(NamedTuple):
    """Rows with a common beginning.

    Attributes:
        rows: Their numbers in the batch.
        shared: How many tokens they share; 0 for a row of its own.
    """

    rows: tuple[int, ...]
    shared: int


class Segment(NamedTuple):
    """Tokens that follow each other in a row and in the packed row.

    Attributes:
        begin: The first token's place in the packed row.
        end: The place behind the last one.
        prefix: Where the tokens before these in their row begin and end; equal places if there are none.
    """

    begin: int
    end: int
    prefix: tuple[int, int] = (0, 0)


class AttentionDocuments(NamedTuple):
    """What attention needs to know of a packed row; see `kernels.attention.plan`.

    Attributes:
        offsets: (documents + 1,), int32, where the queries of each document begin.
        keys: (K,), the token of each key; None if each document has its own tokens as keys.
        key_offsets: (documents + 1,), int32, where the keys of each document begin.
    """

    offsets: np.ndarray
    keys: np.ndarray | None
    key_offsets: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A packed row of T tokens, of a batch of B rows and S columns.

    Attributes:
        tokens: (T,), the place of each token in the flattened batch, in the first row that has it.
        shared_by: (T,), how many rows have the token.
        places: (B, S), the place of each token in the packed row; -1 for padding, and for rows of other packed rows.
        segments: The segments of the packed row, in its order.
    """

    tokens: np.ndarray
    shared_by: np.ndarray
    places: np.ndarray
    segments: list[Segment]

    def documents(self, window: int, chunk: int) -> AttentionDocuments:
        """The documents of attention that sees `window` keys, in chunks of `chunk` tokens of a row; 0 for all."""
        queries, keys = [0], [0]
        pieces: list[np.ndarray] = []
        for segment in self.segments:
            first, behind = segment.prefix
            before = behind - first
            # The segment is tokens `before` to `last` of its row, cut where chunks begin.
            last = before + segment.end - segment.begin
            chunks = range((before // chunk + 1) * chunk, last, chunk) if chunk else ()
            for begin, end in itertools.pairwise((before, *chunks, last)):
                # The keys of a row's tokens `begin` to `end`: from `seen` on, in the prefix and in the segment itself.
                seen = max(begin // chunk * chunk if chunk else 0, begin - window + 1 if window else 0)
                own = max(seen, before)
                if seen < before:
                    pieces.append(np.arange(first + seen, behind))
                pieces.append(np.arange(segment.begin + own - before, segment.begin + end - before))
                queries.append(queries[-1] + end - begin)
                keys.append(keys[-1] + end - seen)
        own_keys = None if keys == queries else np.concatenate(pieces)
        return AttentionDocuments(np.array(queries, np.int32), own_keys, np.array(keys, np.int32))


def starts_and_lengths(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The first column of each row of a mask (B, S) that is not padding, and how many are not.

    None if there is padding between tokens. A row of padding has length 0.
    """
    lengths = mask.sum(1)
    starts = mask.argmax(1)
    last = mask.shape[1] - mask[:, ::-1].argmax(1)
    return None if ((last - starts != lengths) & (lengths > 0)).any() else (starts, lengths)


def groups_of(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, share: bool) -> list[Group]:
    """The groups of a batch's rows, in the order of their first rows; rows of padding are left out.

    Args:
        ids: (B, S), the tokens.
        starts: (B,), the first column of each row.
        lengths: (B,), how many tokens it has.
        share: Whether rows may share tokens.
    """
    rows = np.flatnonzero(lengths).tolist()
    groups: list[Group] = []
    saved = 0
    # Sorted by their first columns, then by their tokens, whose bytes, the highest first, order as they do.
    tokens, keys = {}, []
    for row in rows if share else ():
        tokens[row] = ids[row, starts[row] : starts[row] + lengths[row]].astype(">i8")
        keys.append((int(starts[row]), tokens[row].tobytes(), row))
    for _, same_start in itertools.groupby(sorted(keys), operator.itemgetter(0)):
        members: list[int] = []
        common: list[int] = []
        for *_, row in same_start:
            if members:
                before = tokens[members[-1]]
                shorter = min(len(before), len(tokens[row]))
                different = np.flatnonzero(before[:shorter] != tokens[row][:shorter])
                common.append(int(different[0]) if len(different) else shorter)
            members.append(row)
        levels = np.unique(common)
        if len(levels) > _MOST_LEVELS:  # some of them, to which the others are rounded down
            levels = levels[:: -(-len(levels) // _MOST_LEVELS)]
            common = levels[np.searchsorted(levels, common, "right") - 1].tolist()
        best = _best_groups(members, common, [0])[0]
        saved += best.saved
        groups += best.groups
        for row in best.left:
            groups.append(Group((row,), 0))
    if saved and saved >= _LEAST_SAVED * lengths.sum():
        return sorted(groups)
    return [Group((row,), 0) for row in rows]


class _Choice(NamedTuple):
    """How neighbouring rows may be grouped.

    Attributes:
        saved: The tokens saved, with those that the rows left save in a group above.
        groups: The groups.
        left: The rows in no group.
    """

    saved: int
    groups: list[Group]
    left: list[int]


def _best_groups(members: list[int], common: list[int], above: list[int]) -> list[_Choice]:
    """For each number of tokens that a group above has, what saves most tokens.

    Rows that begin with the same tokens are neighbours, and those among them that have more in common again: a tree. At
    each of its nodes, the rows below that are in no group yet become one, or stay for a node above, whichever saves
    more.

    Args:
        members: Rows in order.
        common: How many tokens each has in common with the next.
        above: The tokens of a group above, for each that these rows may stay for; 0 if they stay alone.
    """
    if not common:
        return [_Choice(shared, [], members) for shared in above]
    least = min(common)
    pieces, begin = [], 0
    for end, shared in enumerate([*common, least], 1):
        if shared == least:
            pieces.append(_best_groups(members[begin:end], common[begin : end - 1], [*above, least]))
            begin = end
    choices = []
    for below in zip(*pieces):
        saved, groups, left = 0, [], []
        for piece in below:
            saved += piece.saved
            groups += piece.groups
            left += piece.left
        choices.append(_Choice(saved, groups, left))
    saved, groups, left = choices.pop()
    together = _Choice(saved - least, [*groups, Group(tuple(sorted(left)), least)], [])  # one row has its tokens
    for place, apart in enumerate(choices):
        if together.saved > apart.saved:
            choices[place] = together
    return choices


def parts_of(groups: Sequence[Group], lengths: np.ndarray, most: int | None) -> list[list[Group]]:
    """The groups of each packed row, none of which has more than `most` tokens.

    A group of more tokens is taken apart, and its parts share the beginning among themselves. A row of more tokens is
    a packed row of its own. The largest come first, each into the first packed row with room for it.
    """
    if most is None:
        return [list(groups)]
    pieces = [piece for group in groups for piece in _taken_apart(group, lengths, most)]
    parts: list[list[Group]] = []
    rooms: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -_tokens(piece, lengths)):
        tokens = _tokens(piece, lengths)
        place = next((place for place, room in enumerate(rooms) if room >= tokens), len(parts))
        if place == len(parts):
            parts.append([])
            rooms.append(most)
        parts[place].append(piece)
        rooms[place] -= tokens
    return parts


def _tokens(group: Group, lengths: np.ndarray) -> int:
    return group.shared + sum(int(lengths[row]) - group.shared for row in group.rows)


def _taken_apart(group: Group, lengths: np.ndarray, most: int) -> Iterator[Group]:
    """The group in pieces of at most `most` tokens, or of one row."""
    rows: list[int] = []
    for row in group.rows:
        if rows and _tokens(Group((*rows, row), group.shared), lengths) > most:
            yield Group(tuple(rows), group.shared if len(rows) > 1 else 0)
            rows = []
        rows.append(row)
    yield Group(tuple(rows), group.shared if len(rows) > 1 else 0)


def layout_of(groups: Sequence[Group], starts: np.ndarray, lengths: np.ndarray, columns: int) -> Layout:
    """The packed row of these groups; that of no group holds the first token of the batch, which no row has.

    Args:
        groups: Groups that [`groups_of`] returned.
        starts: (B,), the first column of each row.
        lengths: (B,), how many tokens it has.
        columns: S, the number of columns.
    """
    segments: list[Segment] = []
    places = np.full((len(starts), columns), -1)
    count = 0
    for rows, shared in groups:
        first = int(starts[rows[0]])
        prefix = count, count + shared
        if shared:
            segments.append(Segment(*prefix))
            places[list(rows), first : first + shared] = np.arange(*prefix)
        count += shared
        for row in rows:
            begin, end = first + shared, int(starts[row] + lengths[row])
            if end > begin:
                segments.append(Segment(count, count + end - begin, prefix))
                places[row, begin:end] = np.arange(count, count + end - begin)
            count += end - begin
    if not count:
        return Layout(np.zeros(1, np.int64), np.ones(1, np.int64), places, [Segment(0, 1)])
    # Of a token that rows share, the place in the first of them, which is written last.
    tokens = np.empty(count, np.int64)
    of_rows = np.flatnonzero(places >= 0)[::-1]
    tokens[places.ravel()[of_rows]] = of_rows
    return Layout(tokens, np.bincount(places.ravel()[of_rows]), places, segments)
