"""The sort of rows by expert as kernels: any choice of experts, any strides, and what a negative id does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liger_trainer.kernels.moe import routing as moe_routing
from liger_trainer.kernels.moe.routing import (
    sort_by_expert,
    sort_by_expert_reference,
    tile_table,
    tile_table_reference,
)

DEVICE = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


@given(
    tokens=st.integers(0, 160),
    top_k=st.integers(1, 5),
    num_experts=st.integers(1, 70),
    used=st.integers(1, 80),
    layout=st.sampled_from(["contiguous", "transposed", "strided"]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    block_rows=st.sampled_from([1, 16, 48]),
)
@settings(max_examples=10, deadline=None)
def test_any_choice_of_experts(tokens, top_k, num_experts, used, layout, dtype, block_rows):
    """`used` experts are chosen from: few of them as skewed as all tokens to one, more than there are as sentinels."""
    generator = torch.Generator().manual_seed(tokens)
    index = torch.randint(0, used, (2 * tokens, top_k), generator=generator).to(DEVICE, dtype)
    index = {"contiguous": index[:tokens], "transposed": index.mT.contiguous().mT, "strided": index[::2]}[layout]
    rows = sort_by_expert(index, num_experts)
    assert all(map(torch.equal, rows, sort_by_expert_reference(index, num_experts)))
    table = tile_table(rows.offsets, block_rows, index.numel())
    assert torch.equal(table, tile_table_reference(rows.offsets, block_rows, index.numel()))


@pytest.mark.parametrize("beyond", [2**31 - 1, 2**32, 2**63 - 1])
def test_ids_beyond_32_bits_are_no_experts(beyond):
    index = torch.tensor([[1, beyond], [beyond, 0]], device=DEVICE)
    rows = sort_by_expert(index, 2)
    assert rows.order.tolist() == [3, 0, 1, 2]
    assert rows.offsets.tolist() == [0, 1, 2]


@pytest.mark.parametrize("negative", [-1, -(2**32), -(2**32) + 1])
def test_a_kernel_leaves_negative_ids_out_and_says_so(negative, monkeypatch):
    """What the device's assertion is given; on the CPU a ValueError comes before it."""
    flags = []
    monkeypatch.setattr(torch, "_assert_async", lambda flag, message: flags.append((int(flag), message)))
    index = torch.tensor([[1, negative], [0, 2]], device=DEVICE)
    _, _, offsets = moe_routing._launch_sort(index, 3)
    moe_routing._launch_sort(index.clamp_min(0), 3)
    assert offsets.tolist() == [0, 1, 2, 3]
    assert [flag for flag, _ in flags] == [0, 1]
    assert "`top_k_index` has a negative id" in flags[0][1]
