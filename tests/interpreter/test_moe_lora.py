"""Adapters on experts with the kernels: values and gradients of W + s B A."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.moe_experts import moe_experts_reference
from tests.kernels.test_moe_lora import Case


@pytest.mark.parametrize("ranks", [(3,), (2, 17)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "transposed": True, "interleaved": True}, {"gated": False, "activation": "gelu"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_all_gradients(dtype, options, ranks):
    case = Case(ranks, dtype=dtype, adapter_dtype=torch.float32, **options)
    wide = Case(ranks, **options)
    for leaf, exact in zip(case.leaves, wide.leaves):
        exact.data.copy_(leaf.data)
    for ours, true in zip(case.results(), wide.results(moe_experts_reference)):
        assert (ours.double() - true).norm() <= (1e-6 if dtype == torch.float32 else 2e-2) * true.norm()
