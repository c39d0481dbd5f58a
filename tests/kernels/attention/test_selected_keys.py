"""Attention of queries to the keys that an indexer has selected, as bits, against the dense mask in float64."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import torch
import triton
from torch.utils.checkpoint import checkpoint

from liger_trainer.kernels.attention import attention_launch
from liger_trainer.kernels.attention import plan as plans
from liger_trainer.kernels.attention.attention import attention, attention_reference
from liger_trainer.kernels.attention.attention_launch import Tile
from liger_trainer.kernels.attention.plan import AttentionPlan, bits_of, dense
from tests.accuracy import seeded_randn
from tests.aot import compile_launch, launches_on
from tests.calls import saved_tensors
from tests.kernels.attention.shared_prompts import Group, tokens_of
from tests.kernels.attention.shared_prompts import plan_of as plan_of_shared
from tests.kernels.attention.test_attention import check, check_operator, operands, results

EDGES = (1, 31, 32, 33, 63, 64, 65, 15, 16, 17)  # documents around the ends of words and of tiles
GROUPS = (Group(40, (1, 33, 2)), Group(1, (31,)), Group(0, (3,)))


def documents(*lengths, window=0, device="cpu"):
    offsets = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), offsets]).to(torch.int32)
    return AttentionPlan(window, offsets.to(device), max(lengths) + 3)  # a bound may be loose


PLANS = {  # with the number of rows and their tokens
    "rows": (AttentionPlan(0, None, 70), 2, 70),
    "a window": (AttentionPlan(37, None, 70), 2, 70),
    "documents": (documents(1, 31, 32, 33, 63, 10, 64, 65, 0, 15, 16, 7, 3), 2, 170),
    "documents and a window": (documents(*EDGES, 3, window=20), 1, 340),
    "shared prompts": (plan_of_shared(GROUPS, 0), 1, tokens_of(GROUPS)),
    "shared prompts and a window": (plan_of_shared(GROUPS, 20), 1, tokens_of(GROUPS)),
}


def draw(plan, batch, length, count):
    """So many tokens of its row for each query: itself, and others which it may not even see."""
    generator = torch.Generator().manual_seed(count)
    indices = torch.rand(batch, length, length, generator=generator).argsort(-1)[..., :count]
    indices[..., 0] = torch.arange(length)
    return indices.to(torch.int32)


def on(device, plan):
    keys = plan.keys
    if keys is not None:
        keys = keys._replace(copies=type(keys.copies)(*(x.to(device) for x in keys.copies)))
        keys = keys._replace(offsets=keys.offsets.to(device))
    moved = (None if x is None else x.to(device) for x in (plan.offsets, plan.bits))
    return plan._replace(**dict(zip(("offsets", "bits"), moved)), keys=keys)


def selecting(name, count, device="cpu"):
    """The plan of that name with such a selection, and its rows and their tokens."""
    plan, batch, length = PLANS[name]
    bits = bits_of(plan, draw(plan, batch, length, count), length)
    return on(device, plan._replace(bits=bits.flatten(1))), batch, length


def tensors_of(device, batch, length, dtype=torch.float32, heads=(2, 1), head_dim=16, value_dim=None):
    return operands(device, dtype, heads, head_dim, value_dim, length=length, batch=batch)


# ---------------------------------------------------------------------------------------------------------------------
# The bits
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 5, 70])
@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_the_mask_of_what_is_selected_and_seen(name, count):
    plan, batch, length = PLANS[name]
    indices = draw(plan, batch, length, count)
    chosen = torch.zeros(batch, length, length, dtype=torch.bool).scatter(-1, indices.long(), True)[:, None]
    expected = chosen & dense(plan, batch, length, torch.device("cpu"))
    found = plan._replace(bits=bits_of(plan, indices, length).flatten(1))
    assert torch.equal(dense(found, batch, length, torch.device("cpu")), expected)
    assert not found.masks_nothing


@pytest.mark.parametrize("name", PLANS)
def test_bits_are_the_same_by_blocks_of_queries(name):
    plan, batch, length = PLANS[name]
    indices = draw(plan, batch, length, 9)
    blocks = [bits_of(plan, indices[:, first : first + 33], length, first) for first in range(0, length, 33)]
    assert torch.equal(torch.cat(blocks, 2), bits_of(plan, indices, length))


@pytest.mark.parametrize("bits", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_masks_are_the_same_by_blocks_of_queries(name, bits, monkeypatch):
    plan, batch, length = selecting(name, 9) if bits else PLANS[name]
    whole = dense(plan, batch, length, torch.device("cpu"))
    blocks = [dense(plan, batch, length, torch.device("cpu"), rows=slice(i, i + 33)) for i in range(0, length, 33)]
    assert torch.equal(torch.cat(blocks, 2), whole)
    monkeypatch.setattr(plans, "BLOCK", 7)
    assert torch.equal(dense(plan, batch, length, torch.device("cpu")), whole)


def test_bits_of_keys_that_are_not_seen_are_not_set():
    """Of later ones, and of another document: there would be no tiles to skip."""
    plan = documents(40, 30)
    everything = torch.arange(70).expand(1, 70, 70)
    bits = bits_of(plan, everything, 70).flatten(1)
    assert bits.shape == (2, 70)
    counts = sum((bits >> place & 1).sum(0) for place in range(32))
    assert counts.tolist() == [*range(1, 41), *range(1, 31)]


def test_they_take_a_bit_for_each_pair_of_a_document():
    plan = documents(64, 64, 64)._replace(longest=64)
    assert bits_of(plan, torch.zeros(1, 192, 4, dtype=torch.int32), 192).shape == (2, 1, 192)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 71), torch.int32), ((1, 70), torch.int32), ((2, 70, 1), torch.int32), ((2, 70), torch.int64)],
)
def test_bits_that_do_not_fit(shape, dtype):
    x = torch.zeros(1, 70, 2, 16)
    plan = documents(40, 30)._replace(bits=torch.zeros(shape, dtype=dtype))
    with pytest.raises(ValueError, match=r"`plan.bits` is torch.int.*; it must be torch.int32 \(2, 70\)"):
        attention(x, x, x, plan=plan)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.kernel
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize("name", PLANS)
def test_values_and_gradients(name, count, device):
    plan, batch, length = selecting(name, count, device)
    # The weight of one key is 1, whatever its score; beside a sink it has gradients.
    sinks = seeded_randn(2, seed=5, device=device) if count == 1 else None
    check(tensors_of(device, batch, length), sinks, plan)


HEADS = [((1, 1), 192, 128), ((2, 2), 256, 256), ((8, 1), 96, 64), ((4, 2), 64, 64), ((2, 1), 320, 320)]


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("heads", "head_dim", "value_dim"), HEADS, ids=str)
def test_heads(heads, head_dim, value_dim, dtype, device):
    plan = documents(33, 1, 16)
    plan = on(device, plan._replace(bits=bits_of(plan, draw(plan, 1, 50, 9), 50).flatten(1)))
    check(tensors_of(device, 1, 50, dtype, heads, head_dim, value_dim), None, plan)


@pytest.mark.kernel
@pytest.mark.parametrize("extra", ["soft-cap", "sinks"])
def test_soft_caps_and_sinks(extra, device):
    plan, batch, length = selecting("documents and a window", 9, device)
    sinks = seeded_randn(2, seed=5, device=device) if extra == "sinks" else None
    softcap = 2.0 if extra == "soft-cap" else None
    check(tensors_of(device, batch, length), sinks, plan, softcap=softcap)


TILES = [(16, 16), (16, 64), (64, 16), (32, 128), (128, 32)]


def by(tile):
    return "x".join(map(str, tile))


@pytest.mark.kernel
@pytest.mark.parametrize("tile", TILES, ids=by)
@pytest.mark.parametrize("name", ["a window", "documents", "shared prompts and a window"])
def test_any_tile(name, tile, device, monkeypatch):
    """Of half a word of keys, and of several words."""
    monkeypatch.setattr(attention_launch, "tile_for", lambda *kernel: Tile(*tile, 4, 1))
    plan, batch, length = selecting(name, 9, device)
    check(tensors_of(device, batch, length), None, plan)


@pytest.mark.kernel
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_lengths_at_the_edges_of_tiles(length, device):
    plan = AttentionPlan(0, None, length)
    plan = on(device, plan._replace(bits=bits_of(plan, draw(plan, 2, length, 5), length).flatten(1)))
    check(tensors_of(device, 2, length), None, plan)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["documents and a window", "shared prompts"])
def test_a_key_more_is_seen(name, device):
    """What the cases above compare tells one selection from the next."""
    plan, batch, length = selecting(name, 5, device)
    more, _, _ = selecting(name, 6, device)
    tensors = tensors_of(device, batch, length)
    truth, off = (results(attention_reference, tensors, None, each) for each in (plan, more))
    assert not any(torch.allclose(*pair, atol=1e-3) for pair in zip(truth, off))


@pytest.mark.kernel
@pytest.mark.parametrize("name", PLANS)
def test_all_keys_are_those_of_the_plan(name, device):
    """Whatever bits say of keys that the plan does not let a query see."""
    plan, batch, length = selecting(name, 1, device)
    tensors = tensors_of(device, batch, length)
    full = plan._replace(bits=torch.full_like(plan.bits, -1))
    check(tensors, None, full)
    for one, other in zip(*(results(attention, tensors, None, each) for each in (full, plan._replace(bits=None)))):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("tile", [(16, 16), (32, 64), (16, 128)], ids=by)
def test_tiles_without_a_selected_key_are_not_visited(tile, device, monkeypatch):
    """A tile that is read and masked would make NaN of what it holds."""
    monkeypatch.setattr(attention_launch, "tile_for", lambda *kernel: Tile(*tile, 4, 1))
    length, hidden = 384, slice(128, 256)
    plan = AttentionPlan(0, None, length)
    near = torch.arange(length)[:, None] - torch.arange(3)  # itself and the two before it, and the first key
    near[256:258] = torch.arange(256, 258)[:, None]
    indices = torch.cat([near.clamp(min=0), torch.zeros(length, 1, dtype=torch.int64)], -1)[None]
    plan = on(device, plan._replace(bits=bits_of(plan, indices, length).flatten(1)))
    q, k, v = tensors_of(device, 1, length)
    expected = results(attention_reference, (q, k, v), None, plan)
    for x in (k, v):
        x[:, hidden] = float("nan")
    out, dq, _, _ = results(attention, (q, k, v), None, plan)
    for got, right in ((out, expected[0]), (dq, expected[1])):
        torch.testing.assert_close(got[:, 256:], right[:, 256:], rtol=1e-5, atol=1e-6)
    # The other way around: queries that have selected no key of a block; the first block is selected by all.
    q, k, v = tensors_of(device, 1, length)
    q[:, hidden] = float("nan")
    _, _, dk, dv = results(attention, (q, k, v), None, plan)
    for got, right in ((dk, expected[2]), (dv, expected[3])):
        torch.testing.assert_close(got[:, 256:], right[:, 256:], rtol=1e-5, atol=1e-6)
        assert got[:, 0].isnan().all()


@pytest.mark.kernel
@pytest.mark.parametrize("tile", TILES, ids=by)
@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_the_lists_are_the_tiles_with_a_pair(name, by_keys, tile, device):
    """Each once, in order, and no other, though bits are set of keys that are not seen."""
    plan, batch, length = selecting(name, 2, device)
    tile, tokens = Tile(*tile, 4, 1), batch * length
    copies = plan.keys.copies.index if plan.keys else torch.arange(tokens)
    key_offsets = plan.keys.offsets if plan.keys else None
    longest = length if plan.offsets is None else plan.longest
    noise = torch.zeros_like(plan.bits)
    noise[-1] = -(2**31)  # beyond the documents
    spans = attention_launch.Spans(
        plan.offsets, longest, plan.window, 1.0, 0.0, key_offsets, plan.longest_keys(length), plan.bits | noise
    )
    q, k = (torch.empty(count, 1, 16, device=device) for count in (tokens, len(copies)))
    _, tiles, *_ = attention_launch._selection(spans, q, k, tile, by_keys)
    bounds = torch.arange(0, tokens + 1, length) if plan.offsets is None else plan.offsets.cpu()
    key_bounds = bounds if key_offsets is None else key_offsets.cpu()
    bits = torch.stack([(spans.bits.cpu() >> place) & 1 for place in range(32)], 1).flatten(0, 1).bool().T
    for document, (begin, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist())):
        key_begin, key_end = key_bounds[document : document + 2].tolist()
        keys, queries = key_end - key_begin, end - begin
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        pairs = bits[begin:end, :keys] & (distance >= 0)
        if plan.window:
            pairs &= distance < plan.window
        size, other = (tile.keys, tile.queries) if by_keys else (tile.queries, tile.keys)
        pairs, base = (pairs.T, key_begin) if by_keys else (pairs, begin)
        for block, part in enumerate(pairs.split(size) if len(pairs) else ()):
            expected = [number for number, held in enumerate(part.split(other, 1)) if held.any()]
            found = tiles[base // size + document + block].tolist()
            assert found[1 : 1 + found[0]] == expected


@pytest.mark.kernel
def test_documents_do_not_see_each_other(device):
    plan, batch, length = selecting("documents", 40, device)
    alone, first = documents(33, device=device), 1 + 31 + 32
    tensors = tensors_of(device, 1, batch * length)
    own = slice(first, first + 33)
    short = alone._replace(bits=plan.bits[: -(-36 // 32), own].contiguous(), longest=33)
    expected = results(attention, [x[:, own] for x in tensors], None, short)
    for x in tensors:
        x[:, :first], x[:, own.stop :] = float("nan"), float("inf")
    for got, right in zip(results(attention, tensors, None, plan)[:1], expected):
        torch.testing.assert_close(got[:, own], right, rtol=1e-5, atol=1e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("name", ["documents and a window", "shared prompts"])
def test_every_element_is_written_with_the_same_bits(name, device):
    """New memory holds NaN: `tests/uninitialised.py`."""
    plan, batch, length = selecting(name, 9, device)
    tensors = tensors_of(device, batch, length, heads=(6, 2))
    first, second = (results(attention, tensors, None, plan) for _ in range(2))
    assert all(x.isfinite().all() for x in first)
    assert all(map(torch.equal, first, second))


@pytest.mark.kernel
def test_opcheck(device):
    plan, batch, length = selecting("a window", 5, device)
    check_operator(tensors_of(device, batch, length), True, plan, 2.0)


@pytest.mark.kernel
def test_traced_in_one_graph(device):
    plan, batch, length = selecting("documents", 5, device)
    tensors = tensors_of(device, batch, length)
    torch.compiler.reset()
    traced = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for one, other in zip(*(results(run, tensors, None, plan) for run in (traced, attention)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.kernel
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant, device):
    def checkpointed(q, k, v, **options):
        return checkpoint(lambda *x: attention(*x, **options), q, k, v, use_reentrant=reentrant)

    plan, batch, length = selecting("documents", 5, device)
    gradients = []
    for function in (attention, checkpointed):
        leaves = [x.requires_grad_() for x in tensors_of(device, batch, length)]
        function(*leaves, plan=plan).square().sum().backward()
        gradients.append([x.grad for x in leaves])
    assert all(map(torch.equal, *gradients))


@pytest.mark.kernel
def test_layers_that_share_a_selection_keep_it_once(device):
    plan, batch, length = selecting("rows", 5, device)
    leaves = [x.requires_grad_() for x in tensors_of(device, batch, length)]
    with saved_tensors() as saved:
        for _ in range(2):
            attention(*leaves, plan=plan)
    held = [x for x in saved if x.dtype == torch.int32]
    assert [x.data_ptr() for x in held] == [plan.bits.data_ptr()] * 2


def usage_of(compiled, path):
    """Registers and bytes of the stack, to which registers spill."""
    (path / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path / "kernel.cubin")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(number) for number in re.search(r"REG:(\d+) STACK:(\d+)", found).groups()]


@pytest.mark.skipif(not os.access(triton.knobs.nvidia.cuobjdump.path, os.X_OK), reason="needs Triton's cuobjdump")
@pytest.mark.parametrize("head_dim", [192, 256])
def test_no_more_spills_than_without_a_selection(head_dim, tmp_path):
    """But for a few registers of the forward, which are used before and after its loop alone."""
    x = torch.zeros(1, 256, 2, head_dim, dtype=torch.bfloat16, requires_grad=True)
    spilled = []
    for bits in (None, torch.zeros(8, 256, dtype=torch.int32)):
        with launches_on("sm_90") as launches:
            attention(x, x, x, plan=documents(100, 156)._replace(longest=156, bits=bits)).sum().backward()
        main = [
            launch for launch in launches if launch.kernel.__name__ not in ("selected_tiles_kernel", "delta_kernel")
        ]
        spilled.append([usage_of(compile_launch(launch, "sm_90"), tmp_path)[1] for launch in main])
    assert all(ours <= max(plain, 64) for plain, ours in zip(*spilled, strict=True)), spilled


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "head_dim", "value_dim"), HEADS, ids=str)
def test_real_sizes(heads, head_dim, value_dim, device):
    plan = documents(1000, 1, 1500)
    plan = on(device, plan._replace(bits=bits_of(plan, draw(plan, 1, 2501, 300), 2501).flatten(1)))
    for dtype in (torch.bfloat16, torch.float16):
        tensors = tensors_of(device, 1, 2501, dtype, heads, head_dim, value_dim)
        check(tensors, None, plan)
        first, second = (results(attention, tensors, None, plan) for _ in range(2))
        assert all(map(torch.equal, first, second))
