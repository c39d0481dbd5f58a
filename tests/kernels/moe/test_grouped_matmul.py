"""Grouped products and the sums of each token's rows: what they read, torch's library, precision, compilation."""

from __future__ import annotations

import pytest
import torch

from liger_trainer.kernels.moe import grouped_matmul as operators
from liger_trainer.kernels.moe.grouped_matmul import grouped_rows, grouped_weight_gradient
from liger_trainer.kernels.moe.sort_by_expert import sort_by_expert
from liger_trainer.kernels.moe.token_rows import combine_rows
from tests.aot import compile_launch, recorded_launches


@pytest.mark.parametrize("columns", [16, 20])
def test_the_grouped_matmul_is_asked_where_its_result_is_contiguous(columns, monkeypatch):
    """On a GPU, torch pads rows of the result as it does here on the CPU."""
    weight = torch.randn(2, columns, 16, dtype=torch.bfloat16)
    x, offsets = torch.randn(8, 16, dtype=torch.bfloat16), torch.tensor([4, 8], dtype=torch.int32)
    result = torch.nn.functional.grouped_mm(x, weight.transpose(1, 2), offs=offsets)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(operators, "_on_device", lambda device: True)
    assert operators.library_takes(x, weight) == result.is_contiguous() == (columns == 16)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_compile(target):
    """The thin product with A, and the product that adds B, in Triton and after torch's grouped matmul."""
    rows = sort_by_expert(torch.arange(64).view(32, 2) % 4, 4)
    x, z = torch.zeros(64, 48, dtype=torch.bfloat16), torch.zeros(64, 16, dtype=torch.bfloat16)
    a, b, weight = (torch.zeros(4, *shape, dtype=torch.bfloat16) for shape in ((16, 48), (96, 16), (96, 48)))
    with recorded_launches() as launches:
        operators.launch_rows(z, x, a, rows, 0, False, None, None)
        operators.launch_rows(torch.zeros(64, 96, dtype=torch.bfloat16), x, weight, rows, 0, False, None, (z, b))
        operators.add_to_rows(torch.zeros(64, 96, dtype=torch.bfloat16), rows, None, (z, b))
    assert launches[0].arguments["COLUMNS"] == 16
    assert len(launches) == 3
    for launch in launches:
        compile_launch(launch, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_a_program_does_not_grow_with_the_rank(dtype):
    """An A100 has 163 KiB of shared memory per program, an H100 227."""
    rows = sort_by_expert(torch.arange(4096).view(2048, 2) % 4, 4)
    x, z = torch.zeros(4096, 64, dtype=dtype), torch.zeros(4096, 512, dtype=dtype)
    b, weight = torch.zeros(4, 256, 512, dtype=dtype), torch.zeros(4, 256, 64, dtype=dtype)
    out = torch.zeros(4096, 256, dtype=dtype)
    with recorded_launches() as launches:
        operators.launch_rows(out, x, weight, rows, 0, False, None, (z, b))
        operators.add_to_rows(out, rows, None, (z, b))
    assert len(launches) == 2
    for launch in launches:
        assert compile_launch(launch, "sm_90").metadata.shared <= 163 * 1024


@pytest.mark.parametrize("allowed", ["tf32", "ieee"])
def test_products_are_as_precise_as_torchs_whichever_way_that_was_set(allowed):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = allowed  # as TrainingArguments(tf32=...) has it
        assert operators.precision() == allowed
    finally:
        matmul.fp32_precision = before


@pytest.mark.kernel
def test_a_second_pass_after_the_grouped_matmul(device):
    """A rank of several steps, and a bias that is not contiguous.

    On a GPU in bf16, all that the grouped matmul takes; the interpreter shows in fp32 that nothing else is rounded.
    """
    dtype, rounding = (torch.float32, 1e-5) if device == "cpu" else (torch.bfloat16, 2**-8)
    rows = sort_by_expert(torch.arange(12, device=device).view(6, 2) % 3, 3)
    shapes = (12, 9), (12, 150), (3, 9, 150), (9, 3)
    out, y, v, bias = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    bias = bias.T
    expected = out.double()
    for expert, group in enumerate(rows.order.view(3, 4)):
        start = int(rows.slots[group[0]])
        expected[start : start + 4] += y[start : start + 4].double() @ v[expert].double().T + bias[expert].double()
    operators.add_to_rows(out, rows, bias, (y, v))
    torch.testing.assert_close(out.double(), expected, rtol=rounding, atol=1e-4)


@pytest.mark.kernel
def test_nothing_of_a_row_of_no_expert_reaches_the_sum(device):
    rows = sort_by_expert(torch.tensor([[0, 5], [5, 1]], device=device), 2)
    y = torch.tensor([[1.0], [2.0], [float("nan")], [float("inf")]], device=device)
    weights = torch.tensor([[0.5, float("nan")], [float("inf"), 3.0]], device=device)
    assert combine_rows(y, rows, 2, weights).flatten().tolist() == [0.5, 6.0]


@pytest.mark.gpu
@pytest.mark.parametrize("routed", [64, 3])
def test_grouped_matmul_and_kernels_agree(routed, monkeypatch):
    index = torch.randn(3000, routed, generator=torch.Generator().manual_seed(0)).cuda().topk(2).indices
    rows = sort_by_expert(index, 64)
    x, left = torch.randn(3000, 256).cuda().bfloat16(), torch.randn(6000, 128).cuda().bfloat16()
    weight, bias = torch.randn(64, 128, 256).cuda().bfloat16() / 16, torch.randn(64, 128).cuda().bfloat16()
    thin = torch.randn(6000, 8).cuda().bfloat16(), torch.randn(64, 128, 8).cuda().bfloat16()
    assert operators.library_takes(x, weight) == (torch.cuda.get_device_capability()[0] in (9, 10))

    def products():
        return (
            grouped_rows(x, weight, rows, top_k=2, bias=bias, extra=thin),
            grouped_rows(left, weight, rows, transposed=True),
            grouped_weight_gradient(left, x, rows, right_top_k=2),
        )

    library = products()
    monkeypatch.setattr(operators, "library_takes", lambda *operands: False)
    for got, expected in zip(products(), library):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * expected.float().std().item())
    assert library[2][routed:].eq(0).all()
    assert operators.rows_tile(torch.bfloat16, 200.0, 512).rows == 128
