"""What a packed row holds, against what every token of every row of the padded batch is and sees."""

import numpy as np
import pytest
import torch

from liger_trainer.kernels.attention.plan import dense
from liger_trainer.packing.layout import Group, groups_of, layout_of, parts_of, starts_and_lengths
from liger_trainer.packing.packed_row import packed_rows
from liger_trainer.trainers.fused_forward import TokenStatistics, _scattered
from tests.packing.batches import Rows, random_rows, rows_of_tokens

CASES: dict[str, Rows] = {
    "one row": rows_of_tokens([1, 2, 3]),
    "one token": rows_of_tokens([1]),
    "one-token rows": rows_of_tokens([1], [2], [1], columns=4),
    "all rows padding": rows_of_tokens([], [], columns=3),
    "a row of padding": rows_of_tokens([1, 2], [], [1, 2, 3]),
    "equal rows": rows_of_tokens(*[[1, 2, 3, 4]] * 3),
    "rows inside others": rows_of_tokens([1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 4], [1]),
    "the same tokens from other columns": rows_of_tokens([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3], starts=(0, 1, 1)),
    "two prompts behind a system prompt": rows_of_tokens(
        [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8, 9], [1, 2, 3, 7, 7, 7, 1], [1, 2, 3, 7, 7, 7], [1, 2, 3, 9]
    ),
    "answers that begin alike": rows_of_tokens([1, 2, 5, 6, 7], [1, 2, 5, 6, 8], [1, 2, 9, 9, 9], [1, 2, 9, 9, 8]),
    **{f"random {seed}": random_rows(seed) for seed in range(25)},
}


@pytest.fixture(params=CASES)
def rows(request):
    return CASES[request.param]


def groups(rows, share=True):
    return groups_of(rows.ids, rows.starts, rows.lengths, share)


def layout(rows, share=True):
    return layout_of(groups(rows, share), rows.starts, rows.lengths, rows.ids.shape[1])


def beginning(rows, row, column):
    """Where a row begins, and its tokens up to a column: what a causal model's value for this token depends on."""
    return rows.starts[row], tuple(rows.ids[row, : column + 1][rows.mask[row, : column + 1]])


@pytest.mark.parametrize("share", [True, False])
def test_every_token_is_in_the_row_as_often_as_it_is_told(rows, share):
    found = layout(rows, share)
    assert np.array_equal(found.places >= 0, rows.mask)
    places, columns = found.places[rows.mask], np.nonzero(rows.mask)[1]
    assert np.array_equal(rows.ids.flat[found.tokens[places]], rows.ids[rows.mask])
    assert np.array_equal(found.tokens[places] % rows.ids.shape[1], columns)
    # The places are those of tokens, all of them; without any token, there is one that is no row's.
    assert np.array_equal(np.bincount(places), found.shared_by[: len(set(places))])
    assert len(found.tokens) == max(len(set(places)), 1)
    assert share or (found.shared_by == 1).all()
    of_place: dict[int, set] = {}
    for row, column in zip(*np.nonzero(rows.mask)):
        of_place.setdefault(found.places[row, column], set()).add(beginning(rows, row, column))
    assert all(len(beginnings) == 1 for beginnings in of_place.values())
    edges = [0, *(segment.end for segment in found.segments)]
    assert [segment.begin for segment in found.segments] == edges[:-1]
    assert edges[-1] == len(found.tokens)


def partitions(rows):
    """All ways to put rows into groups."""
    if not rows:
        yield []
        return
    first, *others = rows
    for rest in partitions(others):
        yield [[first], *rest]
        for place, group in enumerate(rest):
            yield [*rest[:place], [first, *group], *rest[place + 1 :]]


def common(rows, group):
    """How many tokens rows have in common from their beginnings on; none if they begin in other columns."""
    lengths = [int(rows.lengths[row]) for row in group]
    if len({rows.starts[row] for row in group}) > 1:
        return 0
    start, count = int(rows.starts[group[0]]), 0
    while count < min(lengths) and len({rows.ids[row, start + count] for row in group}) == 1:
        count += 1
    return count


def test_no_groups_save_more_tokens(rows):
    found = groups(rows)
    assert sorted(row for group in found for row in group.rows) == list(np.flatnonzero(rows.lengths))
    assert all(group.shared == (common(rows, group.rows) if len(group.rows) > 1 else 0) for group in found)
    saved = sum((len(group.rows) - 1) * group.shared for group in found)
    best = max(
        sum((len(group) - 1) * common(rows, group) for group in each)
        for each in partitions(list(np.flatnonzero(rows.lengths)))
    )
    assert saved == (best if best >= 0.05 * rows.lengths.sum() else 0)


def test_as_many_rows_as_fit_a_batch_are_grouped():
    """Prompts with a common first token, a thousand pairs."""
    count = 1000
    tokens = [[1, 2 + i // 2, 2 + i // 2, i] for i in range(2 * count)]
    rows = rows_of_tokens(*tokens)
    assert groups(rows) == [Group((2 * i, 2 * i + 1), 3) for i in range(count)]


def test_rows_that_each_continue_the_one_before_are_grouped():
    """Such as all turns of a long dialogue."""
    rows = rows_of_tokens(*[list(range(1, n + 1)) for n in range(1, 401)])
    found = groups(rows)
    assert sorted(row for group in found for row in group.rows) == list(range(400))
    assert all(group.shared <= min(group.rows) + 1 for group in found)
    assert sum((len(group.rows) - 1) * group.shared for group in found) > 0.9 * rows.lengths.sum()


def test_a_first_token_in_common_is_not_worth_sharing():
    rows = rows_of_tokens([1, *range(10, 40)], [1, *range(50, 80)])
    assert groups(rows) == [Group((0,), 0), Group((1,), 0)]


def expected_mask(rows, places, tokens, window, chunk):
    """What each token sees, of what its row sees in the padded batch; `places` are those of one packed row."""
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for row in range(len(places)):
        columns = np.flatnonzero(places[row] >= 0)
        for query in columns:
            for key in columns[columns <= query]:
                inside = not window or query - key < window
                start = rows.starts[row]
                if inside and (not chunk or (query - start) // chunk == (key - start) // chunk):
                    mask[places[row, query], places[row, key]] = True
    return mask


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (1, 0), (3, 0), (50, 0), (0, 1), (0, 3), (0, 50), (2, 3)])
@pytest.mark.parametrize("most", [None, 7])
def test_tokens_see_what_they_see_in_the_batch(rows, window, chunk, most):
    for row in packed_rows(rows.padded(), True, most):
        count = len(row.layout.tokens)
        plan = row.plan(window, chunk)
        expected = expected_mask(rows, row.layout.places, count, window, chunk)
        if not rows.mask.any():
            expected[:] = True  # the token that is no row's
        assert torch.equal(dense(plan, 1, count, torch.device("cpu"))[0, 0], expected)
        if plan.keys is None:
            continue
        # The kernels sum over keys, of which a document has each once, its own tokens last.
        offsets, ends = plan.offsets.tolist(), plan.keys.offsets.tolist()
        for begin, end, first, behind in zip(offsets, offsets[1:], ends, ends[1:]):
            keys = plan.keys.copies.index[first:behind].tolist()
            assert len(set(keys)) == len(keys)
            assert keys[begin - end :] == list(range(begin, end))
            assert len(keys) <= plan.keys.longest
            assert end - begin <= plan.longest


@pytest.mark.parametrize("most", [1, 4, 9, 1000])
def test_parts_have_at_most_so_many_tokens(rows, most):
    before = groups(rows)
    parts = parts_of(before, rows.lengths, most)
    pieces = [piece for part in parts for piece in part]
    assert sorted(row for piece in pieces for row in piece.rows) == list(np.flatnonzero(rows.lengths))
    whole = {row: group for group in before for row in group.rows}
    for piece in pieces:
        assert len({whole[row].rows for row in piece.rows}) == 1
        assert piece.shared == (whole[piece.rows[0]].shared if len(piece.rows) > 1 else 0)
    for part in parts:
        tokens = len(layout_of(part, rows.starts, rows.lengths, rows.ids.shape[1]).tokens)
        assert tokens <= most or [len(piece.rows) for piece in part] == [1]
    assert len(parts) <= 1 or most < 1000


@pytest.mark.parametrize("most", [None, 7])
@pytest.mark.parametrize("share", [True, False])
def test_statistics_are_back_at_the_labels_of_their_tokens(rows, share, most):
    """Of a model whose statistics are a number for each beginning of a row and label."""
    numbers: dict[tuple, float] = {}
    expected = np.zeros(rows.ids.shape)
    for row, column in zip(*np.nonzero((rows.labels != -100) & rows.mask)):
        key = (*beginning(rows, row, column), rows.labels[row, column])
        expected[row, column] = numbers.setdefault(key, 1.0 + len(numbers))
    made = packed_rows(rows.padded(), share, most)
    values = []
    for each in made:
        tokens = each.layout.tokens[each.scored.tokens.index.numpy()]
        labels = each.scored.labels.tolist()
        assert len(set(zip(tokens, labels))) == len(labels)  # each is scored once
        keys = [(*beginning(rows, *divmod(token, rows.ids.shape[1])), label) for token, label in zip(tokens, labels)]
        values.append(TokenStatistics(torch.tensor([numbers.get(key, 0.0) for key in keys], dtype=torch.float64)))
    found = _scattered(values, made, torch.Size(rows.ids.shape)).log_probs
    assert np.array_equal(found.numpy(), expected)


def test_padding_between_tokens_is_found():
    mask = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert [each.tolist() for each in starts_and_lengths(mask)] == [[0, 1, 0], [2, 2, 0]]
    assert starts_and_lengths(np.array([[1, 1, 1], [1, 0, 1]])) is None
