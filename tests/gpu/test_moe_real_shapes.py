"""Blocks of experts of published models in full size on a GPU: no less exact than the block's own loop in bf16."""

import gc

import pytest
import torch

from tests.moe_blocks import BLOCKS, measure_block, on_meta

pytestmark = pytest.mark.gpu

TOKENS = 4096
# The loop's backward holds, beside the weights, three times the gradient of a stacked weight: what it has summed, the
# next expert's, as large with zeros, and their sum.
BYTES_A_PARAMETER = 4 * 2
OTHERS = 16 * 2**30


@pytest.mark.parametrize("name", BLOCKS)
def test_no_less_exact_than_the_blocks_own_loop(name):
    gc.collect()
    torch.cuda.empty_cache()
    needed = BYTES_A_PARAMETER * sum(parameter.numel() for parameter in on_meta(name).parameters()) + OTHERS
    free, _ = torch.cuda.mem_get_info()
    if free < needed:
        pytest.skip(
            f"needs {needed / 2**30:.0f} GiB of free GPU memory, there are {free / 2**30:.0f}; use a larger GPU"
        )
    measured = measure_block(name, "cuda", torch.bfloat16, TOKENS, torch.float32)
    print(name, *(f"{key}: {error}" for key, error in measured.errors.items()), sep="\n    ")
    assert measured.components == measured.expected_components
    assert measured.same_choices
    assert measured.less_exact(1.1, 5e-6) == {}
