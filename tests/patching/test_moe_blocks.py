"""Blocks of published models, narrow, with all their experts: the code that tests/gpu runs in full size."""

import pytest
import torch

from liger_trainer.patching.moe import experts_formula
from tests.moe_blocks import BLOCKS, measure_block

TOKENS = 64
WIDTHS = {
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def measure(name):
    return measure_block(name, "cpu", torch.float32, TOKENS, torch.float64, WIDTHS)


@pytest.mark.parametrize("name", BLOCKS)
def test_as_exact_as_the_blocks_own_loop(name):
    measured = measure(name)
    assert measured.components == measured.expected_components
    assert measured.same_choices
    assert measured.less_exact(1.1, 5e-6) == {}


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "llama4-scout"])
def test_one_expert_gone_wrong_is_seen(name, monkeypatch):
    original = experts_formula.moe_experts

    def wrong(hidden, index, weights, *projections, **options):
        of_block = len(hidden) == TOKENS  # not of the probe
        weights = torch.where(index == 3, 1.0001 * weights, weights) if of_block else weights
        return original(hidden, index, weights, *projections, **options)

    monkeypatch.setattr(experts_formula, "moe_experts", wrong)
    assert {"output", "hidden", "experts.down_proj"} <= measure(name).less_exact(1.1, 5e-6).keys()
