"""What a packed row holds of a padded batch: each token once that no padding hides and that rows do not share.

Rows that begin in the same column share their common beginnings. A causal model computes the same for such tokens in
each of them, so it is exact to compute them once. What is equal need not be a prompt: the beginnings of answers count
too.

The rows of a group form a trie: a system prompt, prompts behind it, turns behind those, rows that are beginnings of
others, equal rows. A group is its rows in an order in which those with most in common are neighbours, and how many
tokens each shares with the row before; that is the whole trie. With one level of sharing all rows of a group share one
beginning. It is enough where deeper levels save little, and all that layers with a state can continue; of all ways to
group rows so, `_best_groups` finds that with the fewest tokens. If beginnings of very many lengths are inside each
other, only some of the lengths are tried.

The packed row is the trie in pre-order, of the nodes behind one the largest first (with all that is behind it). So a
node's heaviest path is contiguous. Attention takes each such path as one document: its keys are the tokens above it in
the trie, copied, then its own. A row that only continues another one thus copies nothing.

Sharing at more levels never takes more keys. Each row that is no beginning of another ends one document, whose keys are
that row's tokens (with windows of W, those of its path and up to W - 1 before). Without a level there are at least as
many documents, and what was a copied key is one of a token that runs again. So the memory of copied keys is no reason
to leave a level out.

All of this is on the host, in numpy; the trie takes one pass over the rows, and no loop over tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from liger_trainer.kernels.attention.plan import FILLED_BOUNDS

_LEAST_SAVED = 0.05
"""The least share of the tokens worth sharing, and worth sharing at further levels: fewer, such as a first token that
all rows have, cost more than they save."""

_MOST_LEVELS = 40
"""The lengths that the search for the best groups of one level tries; it goes through all pairs of them."""


class Group(NamedTuple):
    """Rows that share their beginnings, a trie.

    Attributes:
        rows: Their numbers in the batch; those below a node of the trie are neighbours.
        common: How many tokens each shares with the row before it here; 0 for the first.
    """

    rows: tuple[int, ...]
    common: tuple[int, ...]


class Segment(NamedTuple):
    """A node of the trie: tokens that follow each other in the packed row and in all rows that have them.

    Attributes:
        begin: The first token's place in the packed row.
        end: The place behind the last one.
        parent: The number of the segment with the tokens before these in their rows; -1 if there are none.
    """

    begin: int
    end: int
    parent: int = -1


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
        segments: The segments of the packed row, in its order, each behind its parent.
        levels: The most segments of a row that it shares with other rows.
        added: How many of the last tokens no row has; see [`filled`].
    """

    tokens: np.ndarray
    shared_by: np.ndarray
    places: np.ndarray
    segments: list[Segment]
    levels: int
    added: int = 0

    def paths(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """The heaviest paths of the tries, in the order of the packed row.

        Yields:
            The first place of each, the place behind its last, and the places of the tokens before these in their rows.
        """
        others = [place for place, each in enumerate(self.segments) if place and each.parent != place - 1]
        for first, behind in itertools.pairwise((0, *others, len(self.segments))):
            begin, _, parent = self.segments[first]
            above: list[np.ndarray] = []
            while parent >= 0:
                above.append(np.arange(self.segments[parent].begin, self.segments[parent].end))
                parent = self.segments[parent].parent
            yield begin, self.segments[behind - 1].end, np.concatenate([*above[::-1], np.arange(0)])

    def documents(self, window: int, chunk: int) -> AttentionDocuments:
        """The documents of attention that sees `window` keys, in chunks of `chunk` tokens of a row; 0 for all."""
        queries, keys = [0], [0]
        pieces: list[np.ndarray] = []
        for first, behind, above in self.paths():
            before = len(above)
            # The path is tokens `before` to `last` of its row, cut where chunks begin.
            last = before + behind - first
            chunks = range((before // chunk + 1) * chunk, last, chunk) if chunk else ()
            for begin, end in itertools.pairwise((before, *chunks, last)):
                # The keys of a row's tokens `begin` to `end`: from `seen` on, above the path and in the path itself.
                seen = max(begin // chunk * chunk if chunk else 0, begin - window + 1 if window else 0)
                own = max(seen, before)
                if seen < before:
                    pieces.append(above[seen:])
                pieces.append(np.arange(first + own - before, first + end - before))
                queries.append(queries[-1] + end - begin)
                keys.append(keys[-1] + end - seen)
        if keys == queries:
            return AttentionDocuments(np.array(queries, np.int32), None, np.array(keys, np.int32))
        if self.added:  # the keys before those of the last document, which has no row, are filled up too
            copied = keys[-1] - queries[-1]
            more = filled_length(copied) - copied
            pieces.insert(-1, np.full(more, queries[-1] - 1))
            keys[-1] += more
        return AttentionDocuments(np.array(queries, np.int32), np.concatenate(pieces), np.array(keys, np.int32))


def filled_length(length: int) -> int:
    """The length to which rows of `length` tokens are filled up: the same or longer, by less than 6 %.

    It is a multiple of the largest power of two that is no more than 6 % of `length`; there are about 17 to 33 such
    lengths between a number and its double.
    """
    step = 1 << max(0, (length * 3 // 50).bit_length() - 1)
    return -(-length // step) * step


def filled(layout: Layout) -> Layout:
    """The packed row with tokens behind those of its rows, so that there are few lengths and numbers of documents.

    They are documents of their own, all but the last of one token, and a mask of them is 0.
    """
    count = len(layout.tokens)
    documents = -(1 + sum(1 for _ in layout.paths())) % FILLED_BOUNDS
    if not documents and filled_length(count) > count:
        documents = FILLED_BOUNDS
    added = filled_length(count + documents) - count
    if not documents:
        return layout
    begins = range(count, count + documents)
    segments = [Segment(begin, end) for begin, end in itertools.pairwise((*begins, count + added))]
    return dataclasses.replace(
        layout,
        tokens=np.append(layout.tokens, np.zeros(added, np.int64)),
        shared_by=np.append(layout.shared_by, np.zeros(added, np.int64)),
        segments=[*layout.segments, *segments],
        added=added,
    )


def starts_and_lengths(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """The first column of each row of a mask (B, S) that is not padding, and how many are not.

    None if there is padding between tokens. A row of padding has length 0.
    """
    lengths = mask.sum(1)
    starts = mask.argmax(1)
    last = mask.shape[1] - mask[:, ::-1].argmax(1)
    return None if ((last - starts != lengths) & (lengths > 0)).any() else (starts, lengths)


def groups_of(
    ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, share: bool, one_level: bool = False
) -> list[Group]:
    """The groups of a batch's rows, in the order of their first rows; rows of padding are left out.

    Args:
        ids: (B, S), the tokens.
        starts: (B,), the first column of each row.
        lengths: (B,), how many tokens it has.
        share: Whether rows may share tokens.
        one_level: Whether no shared beginning may continue another.
    """
    rows = np.flatnonzero(lengths).tolist()
    alone = [Group((row,), (0,)) for row in rows]
    # Sorted by their first columns, then by their tokens, whose bytes, the highest first, order as they do.
    tokens, keys = {}, []
    for row in rows if share else ():
        tokens[row] = ids[row, starts[row] : starts[row] + lengths[row]].astype(">i8")
        keys.append((int(starts[row]), tokens[row].tobytes(), row))
    flat: list[Group] = []
    tries: list[Group] = []
    for _, same_start in itertools.groupby(sorted(keys), operator.itemgetter(0)):
        members = [row for *_, row in same_start]
        common = []
        for row, after in itertools.pairwise(members):
            shorter = min(lengths[row], lengths[after])
            different = np.append(tokens[row][:shorter] != tokens[after][:shorter], True)
            common.append(int(different.argmax()))
        begins = [0, *(place for place, shared in enumerate(common, 1) if not shared), len(members)]
        for begin, end in itertools.pairwise(begins):
            tries.append(Group(tuple(members[begin:end]), (0, *common[begin : end - 1])))
        levels = np.unique(common)
        if len(levels) > _MOST_LEVELS:  # some of them, to which the others are rounded down
            levels = levels[:: -(-len(levels) // _MOST_LEVELS)]
            common = levels[np.searchsorted(levels, common, "right") - 1].tolist()
        best = _best_groups(members, common, [0])[0]
        flat += [*best.groups, *(Group((row,), (0,)) for row in best.left)]
    found, count = alone, int(lengths.sum())
    for groups in (flat, *(() if one_level else (tries,))):
        fewer = sum(int(lengths[row]) - shared for group in groups for row, shared in zip(*group))
        if groups and count - fewer >= _LEAST_SAVED * count:
            found, count = groups, fewer
    return sorted(found, key=lambda group: min(group.rows))


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
    group = Group(tuple(sorted(left)), (0, *[least] * (len(left) - 1)))
    together = _Choice(saved - least, [*groups, group], [])  # one row has its tokens
    for place, apart in enumerate(choices):
        if together.saved > apart.saved:
            choices[place] = together
    return choices


def parts_of(groups: Sequence[Group], lengths: np.ndarray, most: int) -> list[list[Group]]:
    """The groups of each packed row, none of which has more than `most` tokens.

    A group of more tokens is taken apart, and its parts share their beginnings among themselves. A row of more tokens
    is a packed row of its own. The largest come first, each into the first packed row with room for it.
    """
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
    return sum(int(lengths[row]) - shared for row, shared in zip(*group))


def _taken_apart(group: Group, lengths: np.ndarray, most: int) -> Iterator[Group]:
    """The group in pieces of at most `most` tokens, or of one row."""
    begin = tokens = 0
    for place, (row, shared) in enumerate(zip(*group)):
        tokens += int(lengths[row]) - shared
        if place > begin and tokens > most:
            yield Group(group.rows[begin:place], (0, *group.common[begin + 1 : place]))
            begin, tokens = place, int(lengths[row])
    yield Group(group.rows[begin:], (0, *group.common[begin + 1 :]))


class _Node(NamedTuple):
    """A node of the trie of rows in an order.

    Attributes:
        first: The place of its first row in the order.
        depth: How many tokens its rows have in common, up to its last one.
        behind: The place behind its last row.
    """

    first: int
    depth: int
    behind: int


def _nodes(common: Sequence[int], lengths: Sequence[int]) -> list[_Node]:
    """The nodes of a trie in pre-order, the rows in the given order.

    Args:
        common: How many tokens each row has in common with the one before.
        lengths: How many tokens each has.
    """
    path: list[tuple[int, int]] = []  # of the row before: the first row and the depth of each node
    nodes: list[_Node] = []
    for place, (shared, length) in enumerate(zip(common, lengths)):
        first = place
        while path and path[-1][1] > shared:
            first, depth = path.pop()
            nodes.append(_Node(first, depth, place))
        if shared and (not path or path[-1][1] < shared):  # inside the last node that ended
            path.append((first, shared))
        if length > shared:
            path.append((place, length))
    nodes += [_Node(first, depth, len(common)) for first, depth in path]
    return sorted(nodes)


def _largest_first(nodes: Sequence[_Node]) -> list[tuple[_Node, int, int]]:
    """The nodes in pre-order, of those behind one the largest first, with the tokens of all that is behind it.

    Args:
        nodes: The nodes in any pre-order.

    Returns:
        Each node, the depth at which it begins, and the number of its parent in the new order; -1 for none.
    """
    path: list[int] = []
    parents: list[int] = []
    for number, node in enumerate(nodes):
        while path and nodes[path[-1]].behind <= node.first:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(number)
    begins = [nodes[parent].depth if parent >= 0 else 0 for parent in parents]
    tokens = [node.depth - begin for node, begin in zip(nodes, begins)]
    children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]  # those of no node are last
    for number in reversed(range(len(nodes))):
        children[parents[number]].append(number)
        if parents[number] >= 0:
            tokens[parents[number]] += tokens[number]
    ordered: list[tuple[_Node, int, int]] = []
    waiting = [(number, -1) for number in children[-1]]
    while waiting:
        number, parent = waiting.pop()
        # The last one comes next; of equal ones, the one whose rows come first.
        waiting += [(child, len(ordered)) for child in sorted(children[number], key=tokens.__getitem__)]
        ordered.append((nodes[number], begins[number], parent))
    return ordered


def layout_of(groups: Sequence[Group], starts: np.ndarray, lengths: np.ndarray, columns: int) -> Layout:
    """The packed row of these groups; that of no group holds the first token of the batch, which no row has.

    Args:
        groups: Groups that [`groups_of`] returned.
        starts: (B,), the first column of each row.
        lengths: (B,), how many tokens it has.
        columns: S, the number of columns.
    """
    segments: list[Segment] = []
    levels: list[int] = []
    places = np.full((len(starts), columns), -1)
    rows = [row for group in groups for row in group.rows]
    common = [shared for group in groups for shared in group.common]
    count = 0
    for node, begin, parent in _largest_first(_nodes(common, lengths[rows].tolist())):
        start, end = int(starts[rows[node.first]]), count + node.depth - begin
        segments.append(Segment(count, end, parent))
        levels.append((levels[parent] if parent >= 0 else 0) + (node.behind - node.first > 1))
        places[rows[node.first : node.behind], start + begin : start + node.depth] = np.arange(count, end)
        count = end
    if not count:
        return Layout(np.zeros(1, np.int64), np.ones(1, np.int64), places, [Segment(0, 1)], 0)
    # Of a token that rows share, the place in the first of them, which is written last.
    tokens = np.empty(count, np.int64)
    of_rows = np.flatnonzero(places >= 0)[::-1]
    tokens[places.ravel()[of_rows]] = of_rows
    return Layout(tokens, np.bincount(places.ravel()[of_rows]), places, segments, max(levels))
