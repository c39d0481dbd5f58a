"""What a packed row holds, against what every token of every row of the padded batch is and sees."""

import itertools

import numpy as np
import pytest
import torch

from liger_trainer.kernels.attention.attention import attention_reference
from liger_trainer.kernels.attention.plan import FILLED_BOUNDS, AttentionPlan, dense
from liger_trainer.packing.layout import (
    Group,
    filled_length,
    groups_of,
    layout_of,
    parts_of,
    starts_and_lengths,
)
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
    "turns": rows_of_tokens(*([*range(1, 3 * n + 1)] for n in (3, 1, 4, 2, 4))),
    "turns of two conversations": rows_of_tokens(
        *([1, 1, *[person] * (2 * n)] for person in (2, 3) for n in (1, 3, 2)), [1, 1], starts=(2,) * 7
    ),
    "tree search": rows_of_tokens(
        *([1, 2, 3, a, a, 4, 10 * b, b, 5, c] for a, b, c in itertools.product((6, 7), (6, 7), (6, 7)))
    ),
    **{f"random {seed}": random_rows(seed) for seed in range(25)},
}


@pytest.fixture(params=CASES)
def rows(request):
    return CASES[request.param]


def groups(rows, share=True, one_level=False):
    return groups_of(rows.ids, rows.starts, rows.lengths, share, one_level)


def layout(rows, share=True, one_level=False):
    return layout_of(groups(rows, share, one_level), rows.starts, rows.lengths, rows.ids.shape[1])


def beginning(rows, row, column):
    """Where a row begins, and its tokens up to a column: what a causal model's value for this token depends on."""
    return rows.starts[row], tuple(rows.ids[row, : column + 1][rows.mask[row, : column + 1]])


@pytest.mark.parametrize(("share", "one_level"), [(True, False), (True, True), (False, False)])
def test_every_token_is_in_the_row_as_often_as_it_is_told(rows, share, one_level):
    found = layout(rows, share, one_level)
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
    # A segment continues its parent in all of its rows.
    for segment in found.segments:
        for row, column in np.argwhere(found.places == segment.begin):
            before = found.places[row, column - 1] if column > rows.starts[row] else -1
            assert before == (found.segments[segment.parent].end - 1 if segment.parent >= 0 else -1)
    assert found.levels <= (0 if not share else 1 if one_level else found.levels)
    assert (found.levels > 0) == (found.shared_by > 1).any()


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


def beginnings(rows):
    """The distinct tokens of a batch: each with the column and the tokens that it comes behind."""
    return {beginning(rows, row, column) for row, column in zip(*np.nonzero(rows.mask))}


def test_no_groups_save_more_tokens(rows):
    found = groups(rows, one_level=True)
    assert sorted(row for group in found for row in group.rows) == list(np.flatnonzero(rows.lengths))
    for group in found:
        assert group.common == (0, *[common(rows, group.rows)] * (len(group.rows) - 1))
    saved = sum(sum(group.common) for group in found)
    best = max(
        sum((len(group) - 1) * common(rows, group) for group in each)
        for each in partitions(list(np.flatnonzero(rows.lengths)))
    )
    total = rows.lengths.sum()
    assert saved == (best if best >= 0.05 * total else 0)
    least = len(beginnings(rows))  # with all levels
    used = total - saved
    expected = least if used - least >= 0.05 * used else used
    assert sum(int(rows.lengths[row]) - shared for group in groups(rows) for row, shared in zip(*group)) == expected


def test_of_the_nodes_behind_one_the_largest_comes_first():
    """So a batch of turns, in any order, is one document of tokens alone."""
    rows = CASES["turns"]
    found = layout(rows)
    assert len(found.segments) == found.levels == 4
    assert [len(each) for each in found.documents(0, 0)[::2]] == [2, 2]
    assert found.documents(0, 0).keys is None
    found = layout(CASES["turns of two conversations"])
    assert found.levels == 3
    sizes = [end - begin for begin, end, _ in found.paths()]
    assert sizes == [2 + 6, 6]
    short, long = [1, 2, 3], [1, 2, 4, 5, 6, 7]
    found = layout(rows_of_tokens(short, long))
    assert found.segments == [(0, 2, -1), (2, 6, 0), (6, 7, 0)]
    assert found.places.tolist() == [[0, 1, 6, -1, -1, -1], [0, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("window", [0, 1, 3])
def test_no_level_takes_keys(rows, window):
    """What speaks against a level is not the memory of copied keys: it takes no more keys than doing without."""
    counts = [layout(rows, *how).documents(window, 0).key_offsets[-1] for how in ((True,), (True, True), (False,))]
    assert counts == sorted(counts)
    if not window and layout(rows).levels > 1:
        whole = {beginning(rows, row, rows.starts[row] + rows.lengths[row] - 1) for row in np.flatnonzero(rows.lengths)}
        inner = {(start, tokens[:n]) for start, tokens in whole for n in range(len(tokens))}
        assert counts[0] == sum(len(tokens) for _, tokens in whole - inner)


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("window", [0, 4])
def test_attention_of_every_row_and_its_gradients_are_those_of_the_row_alone(rows, window, fills):
    """In float64, with sinks and soft-caps."""
    (row,) = packed_rows(rows.padded(), True, fills_below=fills << 40)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, 8, generator=generator, dtype=torch.float64)

    tokens = len(row.layout.tokens)
    inputs = [drawn(1, tokens, heads).requires_grad_() for heads in (4, 2, 2)]
    sinks = drawn(1)[0, :4].clone().requires_grad_()
    options = {"sinks": sinks, "softcap": 2.0}
    together = attention_reference(*inputs, plan=row.plan(window, 0), **options)
    loss = alone = 0.0
    for places in row.layout.places:
        places = torch.from_numpy(places[places >= 0])
        if not len(places):
            continue
        weights = drawn(len(places), 4)
        plan = AttentionPlan(window if window < len(places) else 0, None, len(places))
        expected = attention_reference(*(each[:, places] for each in inputs), plan=plan, **options)[0]
        torch.testing.assert_close(together[0, places], expected, rtol=0, atol=1e-13)
        loss, alone = loss + (together[0, places] * weights).sum(), alone + (expected * weights).sum()
    if rows.mask.any():
        gradients = (torch.autograd.grad(each, (*inputs, sinks)) for each in (loss, alone))
        for found, expected in zip(*gradients, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_as_many_rows_as_fit_a_batch_are_grouped():
    """Prompts with a common first token, a thousand pairs."""
    count = 1000
    tokens = [[1, 2 + i // 2, 2 + i // 2, i] for i in range(2 * count)]
    rows = rows_of_tokens(*tokens)
    assert groups(rows, one_level=True) == [Group((2 * i, 2 * i + 1), (0, 3)) for i in range(count)]
    (together,) = groups(rows)
    assert together == Group(tuple(range(2 * count)), (0, *[3, 1] * (count - 1), 3))
    assert len(layout(rows).tokens) == 1 + 2 * count + 2 * count


def test_rows_that_each_continue_the_one_before_are_grouped():
    """Such as all turns of a long dialogue."""
    count = 1500  # more than Python calls inside each other
    rows = rows_of_tokens(*[list(range(1, n + 1)) for n in range(1, count + 1)])
    found = groups(rows, one_level=True)
    assert sorted(row for group in found for row in group.rows) == list(range(count))
    assert all(max(group.common) <= min(group.rows) + 1 for group in found)
    assert sum(sum(group.common) for group in found) > 0.9 * rows.lengths.sum()
    chain = layout(rows)
    assert (len(chain.tokens), chain.levels) == (count, count - 1)
    assert chain.documents(0, 0).keys is None


def test_a_first_token_in_common_is_not_worth_sharing():
    rows = rows_of_tokens([1, *range(10, 40)], [1, *range(50, 80)])
    assert groups(rows) == [Group((0,), (0,)), Group((1,), (0,))]


def test_levels_that_save_less_than_a_twentieth_are_left_out():
    """Two prompts with a first token in common."""
    rows = rows_of_tokens(*([1, *[prompt] * 20, *[answer] * 10] for prompt in (2, 3) for answer in (4, 5)))
    assert groups(rows) == [Group((0, 1), (0, 21)), Group((2, 3), (0, 21))]


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
        group = whole[piece.rows[0]]
        place = group.rows.index(piece.rows[0])
        assert piece.rows == group.rows[place : place + len(piece.rows)]
        assert piece.common == (0, *group.common[place + 1 : place + len(piece.rows)])
    for part in parts:
        tokens = len(layout_of(part, rows.starts, rows.lengths, rows.ids.shape[1]).tokens)
        assert tokens <= most or [len(piece.rows) for piece in part] == [1]
    assert len(parts) <= 1 or most < 1000


@pytest.mark.parametrize(("window", "chunk"), [(0, 0), (1, 0), (3, 0), (0, 3)])
def test_filled_rows_have_few_shapes_and_their_tokens_see_the_same(rows, window, chunk):
    (row,), (filled,) = (packed_rows(rows.padded(), True, fills_below=below) for below in (0, 1 << 40))
    count, added = len(row.layout.tokens), filled.layout.added
    assert filled.layout.places.tolist() == row.layout.places.tolist()
    assert filled_length(count + added) == count + added <= filled_length(count + FILLED_BOUNDS)
    assert not filled.inputs["attention_mask"][0, count:].any()
    assert filled.plan(0, 0).offsets.numel() % FILLED_BOUNDS == 0
    plan = filled.plan(window, chunk)
    mask = dense(plan, 1, count + added, torch.device("cpu"))[0, 0]
    assert torch.equal(mask[:count, :count], dense(row.plan(window, chunk), 1, count, torch.device("cpu"))[0, 0])
    assert not mask[:count, count:].any()
    assert not mask[count:, :count].any()
    assert mask.any(1).all()
    if plan.keys is not None:
        copied = plan.keys.copies.index.numel() - count - added
        assert copied == filled_length(copied)
        assert plan.keys.longest == max(np.diff(plan.keys.offsets.tolist()))


def test_the_copied_keys_of_a_filled_row_are_one_of_a_few_numbers():
    prompt = [*range(1, 61)]
    (row,) = packed_rows(rows_of_tokens(*([*prompt, 61 + n] for n in range(4))).padded(), True, fills_below=1 << 40)
    tokens, keys = len(row.layout.tokens), row.plan(0, 0).keys
    assert filled_length(180) == keys.copies.index.numel() - tokens == 184
    begin = keys.offsets[-2]
    assert keys.copies.index[begin : begin + 5].tolist() == [tokens - 1] * 4 + [row.plan(0, 0).offsets[-2]]


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("most", [None, 7])
@pytest.mark.parametrize("share", [True, False])
def test_statistics_are_back_at_the_labels_of_their_tokens(rows, share, most, fills):
    """Of a model whose statistics are a number for each beginning of a row and label."""
    numbers: dict[tuple, float] = {}
    expected = np.zeros(rows.ids.shape)
    for row, column in zip(*np.nonzero((rows.labels != -100) & rows.mask)):
        key = (*beginning(rows, row, column), rows.labels[row, column])
        expected[row, column] = numbers.setdefault(key, 1.0 + len(numbers))
    made = packed_rows(rows.padded(), share, most, fills_below=fills << 40)
    values = []
    for each in made:
        tokens = each.layout.tokens[each.scored.tokens.index.numpy()]
        labels = each.scored.labels.tensor.tolist()
        assert len(set(zip(tokens, labels))) == len(labels)  # each is scored once
        keys = [(*beginning(rows, *divmod(token, rows.ids.shape[1])), label) for token, label in zip(tokens, labels)]
        values.append(TokenStatistics(torch.tensor([numbers.get(key, 0.0) for key in keys], dtype=torch.float64)))
    found = _scattered(values, made, torch.Size(rows.ids.shape)).log_probs
    assert np.array_equal(found.numpy(), expected)


def test_padding_between_tokens_is_found():
    mask = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    assert [each.tolist() for each in starts_and_lengths(mask)] == [[0, 1, 0], [2, 2, 0]]
    assert starts_and_lengths(np.array([[1, 1, 1], [1, 0, 1]])) is None
