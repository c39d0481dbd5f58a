"""Experts with the kernels: operands however they lie, and what rows of no expert hold."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.moe.experts import moe_experts, moe_experts_reference
from liger_trainer.kernels.moe.grouped_matmul import combine_rows
from liger_trainer.kernels.moe.grouped_rows_kernel import precision
from liger_trainer.kernels.moe.routing import sort_by_expert
from tests.kernels.test_moe_experts import cases, gradients, made


def spread(x):
    """As x, with its elements apart and its last two dimensions the other way round in memory."""
    wide = x.new_zeros(*x.shape[:-2], x.shape[-1], 2 * x.shape[-2])
    view = wide[..., ::2].mT
    view.copy_(x.detach())
    return view.requires_grad_(x.requires_grad)


@cases
def test_values_and_gradients(case):
    arguments, options = made(case, torch.float32)
    exact, _ = made(case)
    for result, true in zip(
        gradients(moe_experts, arguments, options), gradients(moe_experts_reference, exact, options)
    ):
        assert (result.double() - true).norm() <= 1e-6 * true.norm()


@pytest.mark.parametrize("case", ["biases", "gpt_oss"])
def test_operands_of_any_strides(case):
    arguments, options = made(case, torch.float32)
    apart = [spread(x) for x in arguments]
    assert not any(x.is_contiguous() for x in apart)
    torch.testing.assert_close(gradients(moe_experts, apart, options), gradients(moe_experts, arguments, options))


def test_nothing_of_a_row_of_no_expert_reaches_the_sum():
    rows = sort_by_expert(torch.tensor([[0, 5], [5, 1]]), 2)
    y = torch.tensor([[1.0], [2.0], [float("nan")], [float("inf")]])
    weights = torch.tensor([[0.5, float("nan")], [float("inf"), 3.0]])
    assert combine_rows(y, rows, 2, weights).flatten().tolist() == [0.5, 6.0]


@pytest.mark.parametrize("allowed", ["tf32", "ieee"])
def test_products_are_as_precise_as_torchs_whichever_way_that_was_set(allowed):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = allowed  # as TrainingArguments(tf32=...) has it
        assert precision() == allowed
    finally:
        matmul.fp32_precision = before
