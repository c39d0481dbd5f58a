"""Blocks of published models with their experts, groups and routing, narrow: what tests/gpu runs in full size."""

import pytest
import torch

from tests.moe_blocks import BLOCKS, build, clear_tokens, measure

WIDTHS = {"hidden_size": 32, "moe_intermediate_size": 24, "intermediate_size": 24}
WIDTHS |= {"shared_expert_intermediate_size": 40}
KERNELS = {
    "deepseek-v3": {"moe_experts (silu)", "grouped_topk_sigmoid_routing", "swiglu"},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_narrow_block_is_as_exact_as_the_blocks_own_loop(name):
    block = build(name, "cpu", torch.float32, WIDTHS)
    hidden = clear_tokens(block, 64, "cpu", torch.float32)
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2))
    errors, report = measure(block, hidden, upstream, torch.float64)
    print(report)
    print(*(f"{key}: {value}" for key, value in errors.items()), sep="\n")
    assert {key for key, value in errors.items() if not value.no_less_exact(1.1, 5e-6)} == set()
