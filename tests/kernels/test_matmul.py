"""Matmuls into given memory."""

import pytest
import torch

from liger_trainer.kernels.runtime import matmul_into

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("columns", [5, 33, 34, 64])
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_between_the_rows_is_read(dtype, out_dtype, columns, add):
    """On CPUs with AMX, torch itself reads it."""
    rows = torch.full((40, 64), float("nan"), dtype=dtype)
    rows[:, :columns] = torch.randn(40, columns)
    left, right = rows[:, :columns], torch.randn(columns, 48).to(dtype)
    out = torch.ones(40, 48, dtype=out_dtype) if add else torch.full((40, 48), float("nan"), dtype=out_dtype)
    matmul_into(out, left, right, add=add)
    expected = left.double() @ right.double() + add
    assert (out - expected).norm() <= 2 * torch.finfo(out_dtype).eps * expected.norm()
