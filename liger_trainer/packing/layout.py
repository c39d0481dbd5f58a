"""What a packed row holds of a padded batch: each token once that no padding hides and that rows do not share.

Rows that begin in the same column share their longest common beginning. A causal model computes the same for it in each
of them, so it is exact to compute it once. What is equal need not be a prompt: the beginnings of answers count too.

Of all ways to group rows, with one shared beginning a group, `_best_groups` finds that with the fewest tokens.
If beginnings of very many lengths are inside each other, only some of the lengths are tried.

All of this is on the host, in numpy.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

_LEAST_SAVED = 0.05
"""Of all tokens: sharing fewer, such as a first token that all rows have, costs more than it saves."""

_MOST_LEVELS = 40
"""Of common beginnings inside each other; the search for the best groups goes through all pairs of levels."""


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


class Documents(NamedTuple):
    """What attention needs to know of a packed row; see `kernels.attention.plan`.

    Attributes:
        offsets: (documents + 1,), where the queries of each document begin.
        keys: (K,), the token of each key; None if each document has its own tokens as keys.
        key_offsets: (documents + 1,), where the keys of each document begin.
    """

    offsets: np.ndarray
    keys: np.ndarray | None
    key_offsets: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """A packed row of T tokens, of a batch of B rows and S columns.

    Attributes:
        tokens: (T,), the place of each token in the flattened batch.
        shared_by: (T,), how many rows have the token.
        places: (B, S), the place of each token in the packed row; -1 for padding, and for rows of other packed rows.
        segments: The segments of the packed row, in its order.
    """

    tokens: np.ndarray
    shared_by: np.ndarray
    places: np.ndarray
    segments: list[Segment]

    def documents(self, window: int, chunk: int) -> Documents:
        """The documents of attention that sees `window` keys, in chunks of `chunk` tokens of a row; 0 for all."""
        queries, keys = [0], [0]
        pieces: list[np.ndarray] = []
        for segment in self.segments:
            first, behind = segment.prefix
            before = behind - first
            for begin, end in _cut(before, before + segment.end - segment.begin, chunk):
                # The keys of a row's tokens `begin` to `end`: from `seen` on, in the prefix and in the segment itself.
                seen = max(begin // chunk * chunk if chunk else 0, begin - window + 1 if window else 0)
                own = max(seen, before)
                if seen < before:
                    pieces.append(np.arange(first + seen, behind))
                pieces.append(np.arange(segment.begin + own - before, segment.begin + end - before))
                queries.append(queries[-1] + end - begin)
                keys.append(keys[-1] + end - seen)
        own_keys = keys == queries
        return Documents(np.array(queries), None if own_keys else np.concatenate(pieces), np.array(keys))


def _cut(begin: int, end: int, chunk: int) -> Iterator[tuple[int, int]]:
    """Tokens `begin` to `end` of a row, cut where chunks begin."""
    edges = range((begin // chunk + 1) * chunk, end, chunk) if chunk else ()
    return itertools.pairwise((begin, *edges, end))


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
    rows = [int(row) for row in np.flatnonzero(lengths)]
    alone = [Group((row,), 0) for row in rows]
    if not share:
        return alone
    groups: list[Group] = []
    # Sorted by their first columns, then by their tokens, whose bytes, the highest first, order as they do.
    tokens = {row: ids[row, starts[row] : starts[row] + lengths[row]].astype(">i8") for row in rows}
    ordered = sorted(rows, key=lambda row: (starts[row], tokens[row].tobytes()))
    for _, same_start in itertools.groupby(ordered, key=lambda row: starts[row]):
        members = list(same_start)
        common = [_common(tokens[one], tokens[other]) for one, other in itertools.pairwise(members)]
        groups += _best_groups(members, _levelled(common))
    saved = sum((len(group.rows) - 1) * group.shared for group in groups)
    if saved < _LEAST_SAVED * lengths.sum():
        return alone
    return sorted(groups, key=lambda group: group.rows[0])


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two rows have in common from their beginning on."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def _levelled(common: list[int]) -> list[int]:
    """The numbers, or at most so many different ones of them, to which the others are rounded down."""
    levels = sorted(set(common))
    levels = levels[:: -(-len(levels) // _MOST_LEVELS) or 1]
    return [levels[bisect.bisect(levels, each) - 1] for each in common]


def _best_groups(members: list[int], common: list[int]) -> list[Group]:
    """The groups of rows in order that save most tokens, given how many each has in common with the next.

    Rows that begin with the same tokens are neighbours, and those among them that have more in common again: a tree. At
    each of its nodes, the rows below that are in no group yet become one, or stay for a node above, whichever saves
    more.
    """

    @functools.cache
    def best(begin: int, end: int, above: int) -> tuple[int, tuple[Group, ...], tuple[int, ...]]:
        """The tokens saved, the groups, and the rows left, each of which saves the `above` tokens of a group above."""
        if end - begin == 1:
            return above, (), (members[begin],)
        least = min(common[begin : end - 1])
        cuts = [begin, *(place + 1 for place in range(begin, end - 1) if common[place] == least), end]

        def below(shared: int) -> tuple[int, tuple[Group, ...], tuple[int, ...]]:
            saved, groups, left = zip(*(best(*piece, shared) for piece in itertools.pairwise(cuts)))
            return sum(saved), sum(groups, ()), sum(left, ())

        apart = below(above)
        saved, groups, left = below(least)
        if saved - least <= apart[0]:  # one row of the group has its tokens
            return apart
        return saved - least, (*groups, Group(tuple(sorted(left)), least)), ()

    _, groups, alone = best(0, len(members), 0)
    return [*groups, *(Group((row,), 0) for row in alone)]


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
    tokens: list[np.ndarray] = []
    shared_by: list[np.ndarray] = []
    segments: list[Segment] = []
    places = np.full((len(starts), columns), -1)
    count = 0

    def add(row: int, begin: int, end: int, rows: int, prefix: tuple[int, int] = (0, 0)) -> tuple[int, int]:
        nonlocal count
        place = count, count + end - begin
        if end > begin:
            tokens.append(np.arange(begin, end) + row * columns)
            shared_by.append(np.full(end - begin, rows))
            segments.append(Segment(*place, prefix))
            count = place[1]
        return place

    for rows, shared in groups:
        first = int(starts[rows[0]])
        prefix = add(rows[0], first, first + shared, len(rows))
        for row in rows:
            end = int(starts[row] + lengths[row])
            own = add(row, first + shared, end, 1, prefix)
            places[row, first:end] = np.concatenate([np.arange(*prefix), np.arange(*own)])
    if not count:
        add(0, 0, 1, 1)
    return Layout(np.concatenate(tokens), np.concatenate(shared_by), places, segments)
