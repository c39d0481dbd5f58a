"""The sort of rows by expert against a loop over them, what it refuses, and its kernels compiled for every GPU."""

import itertools
from unittest import mock

import pytest
import torch

from liger_trainer.kernels.moe import routing as operators
from liger_trainer.kernels.moe.routing import sort_by_expert, tile_table
from tests.aot import TARGETS, compile_launch, recorded_launches


def expected_rows(top_k_index, num_experts):
    experts = [min(expert, num_experts) for expert in top_k_index.flatten().tolist()]
    order = [flat for expert in range(num_experts + 1) for flat, theirs in enumerate(experts) if theirs == expert]
    slots = [order.index(flat) for flat in range(len(order))]
    return order, slots, [sum(theirs < expert for theirs in experts) for expert in range(num_experts + 1)]


def expected_tiles(offsets, block_rows):
    bounds = itertools.pairwise(offsets)
    return [[expert, row] for expert, (first, end) in enumerate(bounds) for row in range(first, end, block_rows)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "num_experts"), [(0, 2, 4), (1, 1, 1), (30, 1, 3), (20, 4, 7), (9, 8, 300)]
)
def test_rows_and_tiles(tokens, top_k, num_experts, dtype):
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, num_experts + 1, (tokens, top_k), generator=generator).to(dtype)
    index[::5] = torch.iinfo(dtype).max  # no expert, as num_experts is
    for view in (index, index.mT.contiguous().mT, index[:1].expand(tokens, top_k), index[1::2]):
        rows = sort_by_expert(view, num_experts)
        assert [part.tolist() for part in rows] == list(expected_rows(view, num_experts))
        assert {part.dtype for part in rows} == {torch.int32}
        for block_rows in (1, 4, 16):
            table = tile_table(rows.offsets, block_rows, view.numel())
            tiles = expected_tiles(rows.offsets.tolist(), block_rows)
            assert table.dtype == torch.int32
            assert len(table) == -(-view.numel() // block_rows) + num_experts
            assert table.tolist() == tiles + [[-1, 0]] * (len(table) - len(tiles))


@pytest.mark.parametrize("num_experts", [1, 3, 8])
def test_as_many_tiles_as_there_can_be(num_experts):
    """One row beyond a multiple of the tile for every expert."""
    offsets = torch.arange(num_experts + 1, dtype=torch.int32) * 5
    table = tile_table(offsets, 4, 5 * num_experts)
    assert table[:, 0].ge(0).sum() == 2 * num_experts


@pytest.mark.parametrize(
    ("index", "num_experts", "message"),
    [
        (torch.tensor([[0, -3]]), 4, "`top_k_index` holds -3; ids are 0 or more, and one from 4 on is no expert"),
        (torch.zeros(4, dtype=torch.int64), 4, r"`top_k_index` is \(4,\); it must be \(tokens, experts a token\)"),
        (torch.zeros(4, 2), 4, "`top_k_index` is torch.float32; it must be int32 or int64"),
        (torch.zeros(4, 2, dtype=torch.int32), 0, "`num_experts` is 0; it must be 1 or more"),
        (torch.zeros(1, 1, dtype=torch.int32).expand(2**16, 2**15), 4, "`top_k_index` has 2147483648 ids"),
    ],
)
def test_what_a_sort_refuses(index, num_experts, message):
    with pytest.raises(ValueError, match=message):
        sort_by_expert(index, num_experts)


@pytest.mark.parametrize(
    ("offsets", "block_rows", "message"),
    [
        (torch.zeros(5), 16, r"`offsets` is \(5,\) of torch.float32"),
        (torch.zeros(1, dtype=torch.int32), 16, r"`offsets` is \(1,\)"),
        (torch.zeros(10, dtype=torch.int32)[::2], 16, r"`offsets` is \(5,\)"),
        (torch.zeros(5, dtype=torch.int32), 0, "`block_rows` is 0; it must be 1 or more"),
    ],
)
def test_what_a_table_refuses(offsets, block_rows, message):
    with pytest.raises(ValueError, match=message):
        tile_table(offsets, block_rows, 64)


def test_opcheck():
    index = torch.tensor([[0, 2], [2, 3]])
    torch.library.opcheck(operators._sort_by_expert, (index, 3))
    torch.library.opcheck(operators._tile_table, (sort_by_expert(index, 3).offsets, 2, 5))


@pytest.mark.parametrize(
    ("num_experts", "dtype", "target"), [*((128, torch.int64, target) for target in TARGETS), (1, torch.int32, "sm_90")]
)
def test_compiles_ahead_of_time(num_experts, dtype, target):
    index = torch.zeros(100, 8, dtype=dtype)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    with mock.patch.object(operators, "triton_drives", return_value=True), recorded_launches() as launches:
        with mock.patch.object(torch, "_assert_async"):  # on what the kernel did not write here
            operators._sort_by_expert(index, num_experts)
        operators._tile_table(offsets, 128, 100)
    assert len(launches) == 3
    for launch in launches:
        compiled = compile_launch(launch, target)
        if target == "sm_90":
            assert "st.local" not in compiled.asm["ptx"]
            assert "atom." not in compiled.asm["ptx"]
