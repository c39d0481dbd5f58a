"""What transformers' mask functions give under our name, compared with the mask that they give under "sdpa"."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import DynamicCache, LlamaConfig, StaticCache, masking_utils
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_overlay,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    or_masks,
    packed_sequence_mask_function,
    sliding_window_overlay,
)

import liger_trainer.attention.interface  # noqa: F401  registers the name
from liger_trainer.compat.private import is_at_least
from liger_trainer.head.step import Step, running
from liger_trainer.kernels.attention.plan import AttentionPlan, dense
from liger_trainer.kernels.documents import documents_of

OURS = "liger_trainer"
CREATE = {
    "full": create_causal_mask,
    "sliding": create_sliding_window_causal_mask,
    "chunked": create_chunked_causal_mask,
}
kinds = pytest.mark.parametrize("kind", CREATE)
LENGTH = 12
SIZES = (1, 2, 3, 4, 5, 11, 12, 13, 40)
"""Of windows and chunks, for rows of `LENGTH`: those about a row's length too."""


def config(attention: str, size: int = 4) -> LlamaConfig:
    made = LlamaConfig(hidden_size=8, num_attention_heads=1, num_hidden_layers=2, vocab_size=8)
    made.sliding_window = made.attention_chunk_size = size
    made._attn_implementation = attention
    return made


def create(kind: str, attention: str = OURS, size: int = 4, batch: int = 2, length: int = LENGTH, **arguments: Any):
    mask, positions = arguments.pop("attention_mask", None), arguments.pop("position_ids", None)
    return CREATE[kind](config(attention, size), torch.zeros(batch, length, 8), mask, None, positions, **arguments)


def as_dense(mask: Any, batch: int, length: int = LENGTH) -> torch.Tensor:
    """bool (batch, 1, length, length); None is causal, as `sdpa` takes it."""
    if mask is None:
        mask = AttentionPlan(0, None, length)
    if isinstance(mask, AttentionPlan):
        mask = dense(mask, batch, length, torch.device("cpu"))
    assert mask.dtype == torch.bool
    return mask.expand(batch, 1, length, length)


def assert_equal_to_sdpas(kind: str, size: int = 4, batch: int = 2, length: int = LENGTH, **arguments: Any) -> None:
    """Compares the rows of queries that are not padding."""
    ours = create(kind, OURS, size, batch, length, **arguments)
    if isinstance(ours, AttentionPlan):
        assert_sound(ours, batch, length)
    elif not (kind == "chunked" and "position_ids" in arguments and not is_at_least("transformers", "5.23")):
        assert ours is None or length == 1, "a row of one token may be a step of a generation"
    theirs = create(kind, "sdpa", size, batch, length, **arguments)
    got, expected = (as_dense(mask, batch, length) for mask in (ours, theirs))
    real = arguments.get("attention_mask")
    if real is not None:
        got, expected = (mask[:, 0][real.bool()] for mask in (got, expected))
    assert torch.equal(got, expected)


def assert_sound(plan: AttentionPlan, batch: int, length: int) -> None:
    """The plan keeps what the kernels ask of it."""
    assert isinstance(plan.window, int)
    assert isinstance(plan.longest, int)
    if plan.offsets is None:
        assert plan.longest >= length
        return
    assert plan.offsets.dtype == torch.int32
    assert plan.offsets.is_contiguous()
    assert (plan.offsets[0], plan.offsets[-1]) == (0, batch * length)
    lengths = plan.offsets.diff()
    assert (lengths >= 0).all()
    assert plan.longest >= lengths.max()


def padding(left: tuple[int, ...], right: tuple[int, ...], length: int = LENGTH) -> torch.Tensor:
    column = torch.arange(length)
    starts, ends = torch.tensor(left)[:, None], length - torch.tensor(right)[:, None]
    return ((column >= starts) & (column < ends)).long()


def positions(*rows: tuple[int, ...]) -> torch.Tensor:
    """Positions that start anew with each document, from the documents' lengths."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


MASKS = {
    "none": None,
    "ones": padding((0, 0), (0, 0)),
    "right": padding((0, 0), (0, 5)),
    "left": padding((0, 5), (0, 0)),
    "both sides": padding((0, 3), (2, 4)),
    "all but one token": padding((11, 0), (0, 11)),
}


@kinds
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
def test_padding(kind, mask, size):
    assert_equal_to_sdpas(kind, size, attention_mask=MASKS[mask])


@kinds
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_dtypes_of_a_padding_mask(kind, dtype):
    assert_equal_to_sdpas(kind, attention_mask=MASKS["left"].to(dtype))


@kinds
@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_row_of_padding_only(kind, first):
    mask = torch.cat([padding((0, 4), (3, 0)), torch.zeros(1, LENGTH, dtype=torch.long)]).roll(first, 0)
    assert_equal_to_sdpas(kind, batch=3, attention_mask=mask)


PACKED = {
    "documents": positions((5, 3, 4), (2, 9, 1)),
    "one document": positions((12,), (12,)),
    "one row of several": positions((12,), (6, 6)),
    "single tokens": positions((1,) * 12, (1, 1, 10)),
    "shared by the rows": positions((5, 3, 4)),
    "not from zero": torch.tensor([[3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5], [7, 8, 9, 2, 3, 4, 5, 6, 7, 8, 9, 10]]),
    "forwards": torch.tensor([[0, 1, 2, 10, 11, 12, 13, 14, 15, 16, 17, 18], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]),
    "the same twice": torch.tensor([[0, 0, 1, 2, 3, 3, 3, 4, 5, 6, 7, 8], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]]),
}


@kinds
@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("size", SIZES)
def test_packing(kind, packed, size):
    assert_equal_to_sdpas(kind, size, position_ids=PACKED[packed])


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_documents_that_the_forward_knows(kind):
    """The masks of models with a state, some of which pass on no positions."""
    documents = documents_of([5, 3, 4, 2, 9, 1])
    given = {"position_ids": PACKED["documents"]}
    with running(Step(documents=lambda: documents)):
        assert_sound(create(kind), 2, LENGTH)
        for arguments in ({}, given):
            assert torch.equal(as_dense(create(kind, **arguments), 2), as_dense(create(kind, "sdpa", **given), 2))
        behind_padding = create(kind, attention_mask=MASKS["left"])
    assert torch.equal(as_dense(behind_padding, 2), as_dense(create(kind, attention_mask=MASKS["left"]), 2))


@kinds
def test_packing_is_not_looked_for_behind_a_padding_mask(kind):
    """A mask of ones too: so transformers has it."""
    for mask in ("ones", "left", "right"):
        assert_equal_to_sdpas(kind, attention_mask=MASKS[mask], position_ids=PACKED["documents"])


@kinds
@given(data=st.data())
def test_any_padding_or_packing(kind, data):
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 16))
    size = data.draw(st.integers(1, 18))
    if data.draw(st.booleans()):
        pads = [data.draw(st.tuples(st.integers(0, length), st.integers(0, length))) for _ in range(batch)]
        left, right = zip(*((one, min(other, length - one)) for one, other in pads), strict=True)
        assert_equal_to_sdpas(kind, size, batch, length, attention_mask=padding(left, right, length))
        return
    restarts = torch.tensor([[data.draw(st.booleans()) for _ in range(length)] for _ in range(batch)])
    restarts[:, 0] = True
    column = torch.arange(length).expand(batch, length)
    starts = torch.where(restarts, column, 0).cummax(1).values
    assert_equal_to_sdpas(kind, size, batch, length, position_ids=column - starts)


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
@pytest.mark.parametrize(
    "arguments", [{}, {"attention_mask": MASKS["left"]}, {"position_ids": positions((7, 5), (12,))}]
)
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_window_of_one_more_or_less_differs(kind, arguments, size):
    """The comparison sees a window that is off by one."""
    expected = as_dense(create(kind, "sdpa", size, **arguments), 2)
    for wrong in (size - 1, size + 1):
        got = as_dense(create(kind, OURS, wrong, **arguments), 2)
        real = arguments.get("attention_mask", torch.ones(2, LENGTH)).bool()
        assert not torch.equal(got[:, 0][real], expected[:, 0][real])


def test_offsets_shifted_by_one_differ():
    plan = create("full", position_ids=PACKED["documents"])
    expected = as_dense(create("full", "sdpa", position_ids=PACKED["documents"]), 2)
    shifted = plan.offsets.clone()
    shifted[1:-1] += 1
    assert torch.equal(as_dense(plan, 2), expected)
    assert not torch.equal(as_dense(plan._replace(offsets=shifted), 2), expected)


# What a plan cannot say.


def assert_dense_and_equal(kind: str, batch: int = 2, length: int = LENGTH, **arguments: Any) -> None:
    ours = create(kind, OURS, 4, batch, length, **arguments)
    theirs = create(kind, "sdpa", 4, batch, length, **arguments)
    assert isinstance(ours, torch.Tensor)
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours, theirs)


@kinds
def test_holes_inside_a_mask(kind):
    for row in ([1] * 5 + [0] * 2 + [1] * 5, [0, 1, 0] + [1] * 9, [1] * 9 + [0, 1, 0]):
        assert_dense_and_equal(kind, attention_mask=torch.tensor([[1] * LENGTH, row]))


@kinds
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_four_dimensional_mask_is_returned_as_it_is(kind, dtype):
    mask = torch.rand(2, 1, LENGTH, LENGTH).to(dtype)
    assert create(kind, attention_mask=mask) is mask


def every_third(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx % 3 == 0


def never(batch_idx, head_idx, q_idx, kv_idx):
    return kv_idx < 0


@kinds
@pytest.mark.parametrize("arguments", [{}, {"attention_mask": MASKS["left"]}, {"position_ids": PACKED["documents"]}])
@pytest.mark.parametrize("overlay", ["or_mask_function", "and_mask_function"])
@pytest.mark.parametrize("function", [every_third, never, lambda *indices: indices[3] >= 2])
def test_a_function_of_the_users(kind, overlay, function, arguments):
    assert_dense_and_equal(kind, **arguments, **{overlay: function})


ROWS = torch.tensor([[0] * 5 + [1] * 3 + [2] * 4, [0] * 2 + [1] * 9 + [2]])
PACKING = packed_sequence_mask_function(ROWS)
WINDOW, CHUNKS = sliding_window_overlay(4), chunked_overlay(4, torch.zeros(2, dtype=torch.long))


def remapped(function):
    """The function of positions; as it is, where transformers has no such thing."""
    if not is_at_least("transformers", "5.23"):
        return function
    return masking_utils.remap_positions_for_packed_sequence(function, PACKED["documents"])


def masks_of(function, **arguments):
    """What our name and "sdpa" give for a mask function; with a local size, without which "sdpa" may skip the mask."""
    arguments = {"batch_size": 2, "q_length": LENGTH, "kv_length": LENGTH, "mask_function": function, **arguments}
    arguments |= {"allow_is_causal_skip": True, "local_size": 4}
    return [ALL_MASK_ATTENTION_FUNCTIONS[name](**arguments, config=config(OURS)) for name in (OURS, "sdpa")]


@pytest.mark.parametrize(
    "compose", [and_masks, lambda one, two: and_masks(and_masks(two), one)], ids=["flat", "nested"]
)
@pytest.mark.parametrize("packed_first", [True, False])
@pytest.mark.parametrize("causal_first", [True, False])
@pytest.mark.parametrize("overlay", [None, WINDOW, CHUNKS], ids=["causal", "window", "chunks"])
def test_parts_in_any_order(overlay, causal_first, packed_first, compose):
    """The order of a composition changes nothing, and has changed between versions of transformers."""
    parts = [causal_mask_function] if overlay is None else [overlay, causal_mask_function]
    inside = remapped(and_masks(*reversed(parts)) if causal_first else and_masks(*parts))
    got, expected = masks_of(compose(PACKING, inside) if packed_first else compose(inside, PACKING))
    if overlay is CHUNKS and not is_at_least("transformers", "5.23"):  # they begin with the row
        assert isinstance(got, torch.Tensor)
    else:
        assert_sound(got, 2, LENGTH)
    assert torch.equal(as_dense(got, 2), expected)


@pytest.mark.skipif(not is_at_least("transformers", "5.23"), reason="has no positions in masks")
@pytest.mark.parametrize(
    "function",
    [
        lambda: remapped(causal_mask_function),
        lambda: remapped(and_masks(PACKING, causal_mask_function)),
        lambda: and_masks(PACKING, remapped(and_masks(PACKING, causal_mask_function))),
        lambda: and_masks(PACKING, CHUNKS, remapped(causal_mask_function)),
        lambda: and_masks(PACKING, CHUNKS, causal_mask_function),
        lambda: and_masks(PACKING, causal_mask_function, remapped(WINDOW)),
        lambda: and_masks(PACKING, remapped(remapped(causal_mask_function))),
        lambda: and_masks(PACKING, remapped(WINDOW)),
        lambda: and_masks(PACKING, PACKING, remapped(causal_mask_function)),
        lambda: and_masks(PACKING, or_masks(remapped(causal_mask_function), every_third)),
        lambda: and_masks(PACKING, and_masks(remapped(causal_mask_function), every_third)),
    ],
)
def test_compositions_that_almost_are_packing(function):
    got, expected = masks_of(function())
    assert isinstance(got, torch.Tensor)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "function",
    [
        and_masks(sliding_window_overlay(4), every_third),
        and_masks(sliding_window_overlay(4), causal_mask_function, every_third),
        and_masks(sliding_window_overlay(4), sliding_window_overlay(6)),
        and_masks(chunked_overlay(4, torch.zeros(2, dtype=torch.long)), never),
        and_masks(causal_mask_function, every_third),
        or_masks(sliding_window_overlay(4), causal_mask_function),
        sliding_window_overlay(4),
        bidirectional_mask_function,
        functools.partial(every_third),
    ],
)
def test_compositions_that_almost_are_a_window(function):
    for mask in (None, MASKS["left"].bool()):
        got, expected = masks_of(function, attention_mask=mask)
        assert torch.equal(got, expected)


@kinds
@pytest.mark.parametrize("arguments", [{}, {"attention_mask": MASKS["left"]}, {"position_ids": PACKED["documents"]}])
def test_blocks_that_see_each_other(kind, arguments):
    blocks = torch.full((2, LENGTH), -1)
    blocks[0, 3:7], blocks[1, 8:11] = 0, 1
    assert_dense_and_equal(kind, **arguments, block_sequence_ids=blocks)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_without_a_causal_order(kind):
    """`is_causal` false in the configuration: the masks of an encoder."""
    masks = []
    for attention in (OURS, "sdpa"):
        made = config(attention)
        made.is_causal = False
        masks.append(CREATE[kind](made, torch.zeros(2, LENGTH, 8), MASKS["left"], None))
    assert isinstance(masks[0], torch.Tensor)
    assert torch.equal(*masks)


@kinds
def test_a_mask_that_must_not_be_skipped(kind):
    """`allow_is_causal_skip=False` asks for a tensor, which the caller is about to change."""
    for mask in (None, MASKS["ones"], MASKS["left"]):
        assert_dense_and_equal(kind, attention_mask=mask, allow_is_causal_skip=False)


# Caches.


def sees(mask: Any, batch: int, queries: int, keys: int) -> torch.Tensor:
    """bool (batch, 1, queries, keys) of what is no plan; None is causal with the last query at the last key."""
    assert not isinstance(mask, AttentionPlan), "a plan has as many queries as keys"
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    return mask.expand(batch, 1, queries, keys)


def filled(cache: Any, tokens: int) -> Any:
    for layer in range(2):
        cache.update(torch.zeros(2, 1, tokens, 8), torch.zeros(2, 1, tokens, 8), layer)
    return cache


def caches(made: LlamaConfig, kind: str) -> dict[str, Any]:
    if kind == "sliding":
        made.layer_types = ["sliding_attention"] * 2
    return {"dynamic": DynamicCache(config=made), "static": StaticCache(config=made, max_cache_len=20)}


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("seen", [1, 3, 4, 7])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("left", [0, 2])
def test_a_cache_that_holds_something(kind, cache, seen, queries, left):
    masks = []
    for attention in (OURS, "sdpa"):
        made = config(attention)
        past = filled(caches(made, kind)[cache], seen)
        mask = padding((0, left), (0, 0), seen + queries)
        masks.append(CREATE[kind](made, torch.zeros(2, queries, 8), mask, past))
        keys, _ = past.get_mask_sizes(queries, 0)
    got, expected = (sees(mask, 2, queries, keys) for mask in masks)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("left", [0, 2])
def test_the_first_forward_with_a_cache(kind, cache, left):
    masks = []
    for attention in (OURS, "sdpa"):
        made = config(attention)
        past = caches(made, kind)[cache]
        masks.append(CREATE[kind](made, torch.zeros(2, LENGTH, 8), padding((0, left), (0, 0)), past))
        keys, _ = past.get_mask_sizes(LENGTH, 0)
    if isinstance(masks[0], AttentionPlan):
        assert keys == LENGTH
    if keys == LENGTH:
        got, expected = (as_dense(mask, 2) for mask in masks)
        real = padding((0, left), (0, 0)).bool()
        assert torch.equal(got[:, 0][real], expected[:, 0][real])
    else:
        assert (masks[0] is None) == (masks[1] is None)
        assert masks[0] is None or torch.equal(*masks)


@kinds
def test_one_query(kind):
    """A row of one token, and one token behind a padding mask of what a prefix holds."""
    assert_equal_to_sdpas(kind, length=1)
    mask = padding((0, 2), (0, 0))
    ours, theirs = (create(kind, name, length=1, attention_mask=mask) for name in (OURS, "sdpa"))
    assert torch.equal(sees(ours, 2, 1, LENGTH), sees(theirs, 2, 1, LENGTH))


# Reads of the device.


READS = {
    *(getattr(torch.Tensor, name) for name in ("item", "tolist", "numpy", "cpu", "nonzero", "unique", "__array__")),
    *(getattr(torch.Tensor, f"__{name}__") for name in ("bool", "int", "float", "index")),
    *(torch.nonzero, torch.unique, torch.repeat_interleave),
}


class Reads(TorchFunctionMode):
    """Counts what waits for a GPU's queue, were the tensors given at first on one: the host reads their values."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.on_host = WeakTensorKeyDictionary()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_host = bool(tensors) and all(tensor in self.on_host for tensor in tensors)
        self.number += func in READS and not on_host
        out = func(*args, **kwargs)
        moved = func is torch.Tensor.cpu or func is torch.tensor
        if isinstance(out, torch.Tensor) and (moved or on_host):
            self.on_host[out] = True
        return out


def test_reads_are_counted():
    values = torch.arange(4)
    for read in (
        lambda: bool(values.all()),
        lambda: int(values.sum()),
        lambda: values.tolist(),
        lambda: values.nonzero(),
        lambda: values.cpu().nonzero().tolist(),
    ):
        with Reads() as reads:
            read()
        assert reads.number == 1
    with Reads() as reads:
        assert torch.tensor([1, 2]).diff().tolist() == [1]
    assert reads.number == 0


@kinds
@pytest.mark.parametrize(
    "arguments",
    [{"attention_mask": mask} for mask in MASKS.values()] + [{"position_ids": packed} for packed in PACKED.values()],
    ids=[*MASKS, *PACKED],
)
def test_at_most_one_read(kind, arguments, monkeypatch):
    function, reads = ALL_MASK_ATTENTION_FUNCTIONS[OURS], Reads()

    def counted(*args, **kwargs):
        with reads:
            return function(*args, **kwargs)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, OURS, counted)
    create(kind, **arguments)
    assert reads.number <= 1


# Compilation.


@kinds
@pytest.mark.parametrize(
    "arguments",
    [{}, {"attention_mask": MASKS["both sides"]}, {"position_ids": PACKED["documents"]}],
    ids=["whole", "padded", "packed"],
)
def test_compiled(kind, arguments):
    """Traced masks are right, too, and come as a mask or a plan."""

    @torch.compile(backend="eager")
    def traced(**arguments):
        return create(kind, **arguments)

    torch._dynamo.reset()
    got, expected = as_dense(traced(**arguments), 2), as_dense(create(kind, "sdpa", **arguments), 2)
    real = arguments.get("attention_mask")
    if real is not None:
        got, expected = (mask[:, 0][real.bool()] for mask in (got, expected))
    assert torch.equal(got, expected)


def traced(kind, **arguments):
    """What a compiled graph gets, of a config without chunks."""

    made = config(OURS)
    made.attention_chunk_size = None

    @torch.compile(backend="eager", fullgraph=True)
    def run(mask):
        return CREATE[kind](made, torch.zeros(2, LENGTH, 8), mask, None)

    torch._dynamo.reset()
    return run(**arguments)


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize("mask", list(MASKS.values())[1:], ids=list(MASKS)[1:])
def test_padding_in_one_graph_is_a_plan(kind, mask):
    got = traced(kind, mask=mask)
    assert isinstance(got, AttentionPlan)
    expected = as_dense(create(kind, "sdpa", attention_mask=mask), 2)
    assert torch.equal(as_dense(got, 2)[:, 0][mask.bool()], expected[:, 0][mask.bool()])


def test_holes_in_one_graph_are_an_error():
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 4] = 0
    with pytest.raises(RuntimeError, match="masks a token between two that it does not"):
        traced("full", mask=mask)


def test_a_long_row():
    """Without anything of the size of its pairs of tokens."""
    plan = create("full", batch=1, length=1 << 16, position_ids=torch.arange(1 << 16)[None] % 4096)
    assert plan.offsets.tolist() == list(range(0, (1 << 16) + 1, 4096))
    assert plan.longest >= 4096
