"""The sort of rows by expert: against a loop, kernels against the reference, and at the sizes of real models."""

import itertools
import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.moe import sort_by_expert as operators
from liger_trainer.kernels.moe.router import topk_softmax_routing
from liger_trainer.kernels.moe.sort_by_expert import (
    sort_by_expert,
    sort_by_expert_reference,
    tile_table,
    tile_table_reference,
)
from tests.aot import TARGETS, compile_launch, recorded_launches
from tests.device import assert_replayed_without_host_sync

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


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
        (torch.tensor([[0, -3]]), 4, "`top_k_index` holds -3; ids are 0 or more; from 4 on they mean no expert"),
        (torch.zeros(4, dtype=torch.int64), 4, r"`top_k_index` is \(4,\); it must be \(tokens, choices per token\)"),
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


@pytest.mark.parametrize(
    ("num_experts", "dtype", "target"), [*((128, torch.int64, target) for target in TARGETS), (1, torch.int32, "sm_90")]
)
def test_compiles_ahead_of_time(num_experts, dtype, target):
    index = torch.zeros(100, 8, dtype=dtype)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    with mock.patch.object(operators, "TRITON_DEVICES", ("cpu",)), recorded_launches() as launches:
        with mock.patch.object(torch, "_assert_async"):  # on what the kernel did not write here
            operators._sort_by_expert(index, num_experts)
        operators._tile_table(offsets, 128, 100)
    assert len(launches) == 3
    for launch in launches:
        compiled = compile_launch(launch, target)
        if target == "sm_90":
            assert "st.local" not in compiled.asm["ptx"]
            assert "atom." not in compiled.asm["ptx"]


@pytest.mark.kernel
@given(
    tokens=st.integers(0, 160),
    top_k=st.integers(1, 5),
    num_experts=st.integers(1, 70),
    used=st.integers(1, 80),
    layout=st.sampled_from(["contiguous", "transposed", "strided"]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    block_rows=st.sampled_from([1, 16, 48]),
)
@settings(max_examples=10)
def test_any_choice_of_experts(tokens, top_k, num_experts, used, layout, dtype, block_rows):
    """`used` ids are chosen from: from all tokens to one expert, to more ids than there are experts."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(0, used, (2 * tokens, top_k), generator=generator).to(DEVICE, dtype)
    index = {"contiguous": index[:tokens], "transposed": index.mT.contiguous().mT, "strided": index[::2]}[layout]
    rows = sort_by_expert(index, num_experts)
    assert all(map(torch.equal, rows, sort_by_expert_reference(index, num_experts)))
    table = tile_table(rows.offsets, block_rows, index.numel())
    assert torch.equal(table, tile_table_reference(rows.offsets, block_rows, index.numel()))


@pytest.mark.kernel
@pytest.mark.parametrize("beyond", [2**31 - 1, 2**32, 2**63 - 1])
def test_ids_beyond_32_bits_are_no_experts(beyond):
    index = torch.tensor([[1, beyond], [beyond, 0]], device=DEVICE)
    rows = sort_by_expert(index, 2)
    assert rows.order.tolist() == [3, 0, 1, 2]
    assert rows.offsets.tolist() == [0, 1, 2]


@pytest.mark.kernel
@pytest.mark.parametrize("negative", [-1, -(2**32), -(2**32) + 1])
def test_a_kernel_leaves_negative_ids_out_and_says_so(negative, monkeypatch):
    """What the device's assertion is given; on the CPU a ValueError comes before it."""
    flags = []
    monkeypatch.setattr(torch, "_assert_async", lambda flag, message: flags.append((int(flag), message)))
    index = torch.tensor([[1, negative], [0, 2]], device=DEVICE)
    _, _, offsets = operators._launch_sort(index, 3)
    operators._launch_sort(index.clamp_min(0), 3)
    assert offsets.tolist() == [0, 1, 2, 3]
    assert [flag for flag, _ in flags] == [0, 1]
    assert "`top_k_index` has a negative id" in flags[0][1]


CHOICES = {
    "even": lambda size, experts: torch.randint(0, experts, size),
    "all to one": lambda size, experts: torch.full(size, experts - 1),
    "few and sentinels": lambda size, experts: torch.randint(experts - 3, experts + 5, size),
    "zipf": lambda size, experts: (experts * torch.rand(size) ** 4).long(),
}


@pytest.mark.gpu
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(8192, 8, 128), (32771, 10, 512), (5000, 1, 16), (1, 8, 256)])
def test_sizes_of_real_models(choice, tokens, top_k, experts, device):
    torch.manual_seed(0)
    index = CHOICES[choice]((tokens, top_k), experts).to(device)
    for choices in (index, index.int(), index.mT.contiguous().mT):
        rows = sort_by_expert(choices, experts)
        assert all(map(torch.equal, rows, sort_by_expert_reference(choices, experts)))
    for block_rows in (64, 128):
        table = tile_table(rows.offsets, block_rows, index.numel())
        assert torch.equal(table, tile_table_reference(rows.offsets, block_rows, index.numel()))


@pytest.mark.gpu
def test_sixty_million_rows(device):
    torch.manual_seed(0)
    index = torch.randint(0, 128, (2**23, 8), device=device, dtype=torch.int32)
    order, slots, offsets = sort_by_expert(index, 128)
    by_expert = index.view(-1)[order]
    assert (by_expert.diff() >= 0).all()
    assert (order.diff()[by_expert.diff() == 0] > 0).all()  # stable
    assert torch.equal(order[slots], torch.arange(index.numel(), device=device, dtype=torch.int32))
    assert torch.equal(offsets.diff().long(), torch.bincount(index.view(-1), minlength=128))


@pytest.mark.gpu
def test_no_host_sync_and_cuda_graph(device):
    torch.manual_seed(0)
    logits = torch.randn(4096, 128, device=device, dtype=torch.bfloat16).requires_grad_()

    def everything():
        weights, index = topk_softmax_routing(logits, 8)
        (gradient,) = torch.autograd.grad(weights.float().square().sum(), logits)
        rows = sort_by_expert(index, 128)
        return weights.detach(), index, gradient, *rows, tile_table(rows.offsets, 128, index.numel())

    assert_replayed_without_host_sync(everything)


@pytest.mark.gpu
def test_a_negative_id_is_an_assertion_of_the_device():
    """In a process of its own, as it takes the device's context with it."""
    code = (
        "import torch\n"
        "from liger_trainer.kernels.moe.sort_by_expert import sort_by_expert\n"
        "sort_by_expert(torch.tensor([[0, -1]], device=torch.accelerator.current_accelerator()), 4)\n"
        "torch.accelerator.synchronize()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert "`top_k_index` has a negative id" in run.stdout + run.stderr
