"""Adapters on experts with the kernels: values and gradients of W + s B A."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.moe.experts import moe_experts_reference
from liger_trainer.kernels.moe.grouped_library import add_to_rows
from liger_trainer.kernels.moe.routing import sort_by_expert
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


@pytest.mark.parametrize("options", [{}, {"bias": True, "transposed": True}], ids=str)
def test_ranks_of_several_steps(options):
    case, wide = (Case((50, 30), dtype=dtype, **options) for dtype in (torch.float32, torch.float64))
    for ours, true in zip(case.results(), wide.results(moe_experts_reference)):
        assert (ours.double() - true).norm() <= 1e-6 * true.norm()


def test_second_pass_behind_the_grouped_matmul():
    """A rank of several steps, and a bias that is not contiguous."""
    rows = sort_by_expert(torch.arange(12).view(6, 2) % 3, 3)
    out, y, v, bias = torch.randn(12, 9), torch.randn(12, 150), torch.randn(3, 9, 150), torch.randn(9, 3).T
    expected = out.double()
    for expert, group in enumerate(rows.order.view(3, 4)):
        start = int(rows.slots[group[0]])
        expected[start : start + 4] += y[start : start + 4].double() @ v[expert].double().T + bias[expert]
    add_to_rows(out, rows, bias, (y, v))
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
