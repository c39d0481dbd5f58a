"""Casts to fp8: codes and scales, rows that are not finite, odd shapes, and compilation for GPUs with fp8."""

import pytest
import torch

from liger_trainer.kernels.fp8 import row_cast
from liger_trainer.kernels.fp8.row_cast import (
    E4M3_MAX,
    cast_columns,
    cast_rows,
    cast_rows_reference,
    cast_scaled_rows,
    cast_tiles_reference,
    cast_transposed,
    cast_whole,
    largest_magnitude,
)
from tests.accuracy import seeded_randn as randn
from tests.aot import compile_launch, recorded_launches


def magnitudes(rows, columns, dtype, device):
    """Rows whose magnitudes differ by 2^40."""
    return randn(rows, columns, dtype=dtype, device=device) * torch.logspace(-20, 20, rows, 2.0, device=device)[:, None]


def assert_same_bits(actual, expected):
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.is_contiguous()
        torch.testing.assert_close(mine.float(), theirs.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(37, 200), (1, 1), (3, 4096), (130, 16)])
def test_rows_have_the_bits_of_the_reference(shape, dtype, device):
    x = magnitudes(*shape, dtype, device).to(dtype)
    x[-1] = 0
    assert_same_bits(cast_rows(x), cast_rows_reference(x))
    wider = torch.cat([x, x], dim=1)[:, : shape[1]]  # rows further apart
    assert_same_bits(cast_rows(wider), cast_rows_reference(x))
    factors = torch.logspace(-3, 3, shape[1], 2.0, device=device)
    assert_same_bits(cast_scaled_rows(wider, factors), cast_rows_reference(x.float() * factors))


@pytest.mark.kernel
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(70, 100), (64, 64), (1, 3)])
def test_tiles_have_the_bits_of_the_reference(shape, dtype, device):
    x = magnitudes(*shape, torch.bfloat16, device).to(torch.bfloat16)
    x = torch.cat([x, x], dim=1)[:, : shape[1]]  # rows further apart
    largest = largest_magnitude(x)
    for transposed, cast in ((False, cast_whole), (True, cast_transposed)):
        expected = cast_tiles_reference(x, largest, dtype, transposed)
        assert_same_bits(cast(x, dtype), expected)
        assert_same_bits(cast(x.t().contiguous().t(), dtype, largest), expected)
    x[:, -1] = 0
    expected = cast_tiles_reference(x, largest_magnitude(x, dim=0), torch.float8_e4m3fn, transposed=True)
    assert_same_bits(cast_columns(x), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("rows", [1, 15, 16, 17])
def test_a_transpose_is_filled_with_zeros(rows, device):
    x = magnitudes(rows, 48, torch.bfloat16, device).to(torch.bfloat16)
    filled = 32 if rows == 17 else 16
    for codes, scales in (cast_transposed(x), cast_columns(x)):
        assert codes.shape == (48, filled)
        assert not codes[:, rows:].float().any()
        assert ((codes[:, :rows].float() * scales - x.t()).abs() <= x.abs().amax(0)[:, None] / 16 + scales / 1000).all()


@pytest.mark.kernel
def test_every_number_is_a_code_times_its_scale_within_half_a_step(device):
    x = magnitudes(20, 256, torch.float32, device)
    codes, scales = cast_rows(x)
    step = x.abs().clamp(min=scales * 2.0**-6) * 2.0**-4  # 3 bits of mantissa; below 2^-6 even steps of 2^-9
    assert ((codes.float() * scales - x).abs() <= step * 1.0001).all()
    torch.testing.assert_close(codes.float().abs().amax(1), torch.full((20,), E4M3_MAX, device=device))


@pytest.mark.kernel
def test_rows_that_are_not_finite_have_no_finite_scale(device):
    x = randn(4, 32, dtype=torch.bfloat16, device=device)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    assert cast_rows(x)[1].flatten().isfinite().tolist() == [True, False, False, True]
    columns = torch.tensor([3, 5], device=device)
    codes, scales = cast_columns(x)
    assert not scales[columns].isfinite().any()
    assert scales.isfinite().sum() == 30
    for codes, scales in (cast_transposed(x), cast_whole(x)):
        assert not (codes.float() * scales).isfinite().any()


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_compiles_ahead_of_time(target, monkeypatch):
    monkeypatch.setattr(row_cast, "use_triton", lambda tensor: True)
    x = torch.zeros(64, 4096, dtype=torch.bfloat16)
    with recorded_launches() as launches:
        cast_rows(x)
        cast_whole(x, torch.float8_e5m2)
        cast_columns(x)
    for launch, code in zip(launches, ("e4m3", "e5m2", "e4m3"), strict=True):
        assert f"cvt.rn.satfinite.{code}x2" in compile_launch(launch, target).asm["ptx"]
