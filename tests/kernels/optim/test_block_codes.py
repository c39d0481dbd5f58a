"""Numbers in 8 bits with one scale for a block: their errors, what is exact, and the kernels against plain torch."""

import pytest
import torch

from liger_trainer.kernels.optim.block_codes import BLOCK, decode, decode_block, encode, encode_block, fractions
from liger_trainer.kernels.runtime import INTERPRETED, tl, triton

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"


def wide_ranging(signed, rows=64):
    """Blocks of numbers over many binades, and one of zeros."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rows, BLOCK, generator=generator).mul(3).exp() * 1e-9
    if signed:
        values *= torch.randn(rows, BLOCK, generator=generator)
    values[1] = 0.0
    values[2, ::2] = 0.0
    return values


@pytest.mark.parametrize("signed", [True, False])
class TestInTorch:
    def test_errors_are_within_the_stated_bounds(self, signed):
        """So many that some lie halfway between two codes, where the error is 0.95 and 0.98 of the bounds."""
        even = torch.rand(1024, BLOCK, generator=torch.Generator().manual_seed(1)) - (0.5 if signed else 0.0)
        values = torch.cat((wide_ranging(signed), even))
        decoded = decode(*encode(values, signed), signed)
        largest = values.abs().amax(1, keepdim=True)
        error = (decoded - values).abs()
        assert (error <= (0.007 if signed else 0.0035) * largest).all()
        near = values.abs() >= largest / 8
        assert (error[near] <= (0.055 if signed else 0.028) * values.abs()[near]).all()
        assert (decoded.sign() * values.sign() >= 0).all()

    def test_the_largest_of_a_block_is_exact_and_zeros_stay_zero(self, signed):
        values = wide_ranging(signed)
        decoded = decode(*encode(values, signed), signed)
        at = values.abs().argmax(1, keepdim=True)
        assert torch.equal(decoded.gather(1, at), values.gather(1, at))
        assert not decoded[1].any()
        assert (decoded[2, ::2] == 0).all() == signed  # see below

    def test_codes_are_ordered_and_encoding_them_again_changes_nothing(self, signed):
        table = fractions(signed)
        assert (table.diff() > 0).all()
        codes, scales = encode(wide_ranging(signed), signed)
        again = encode(decode(codes, scales, signed), signed)
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scales)


def test_no_second_moment_is_rounded_to_zero():
    values = torch.full((1, BLOCK), 1e-30)
    values[0, 0] = 1.0
    assert (decode(*encode(values, signed=False), signed=False) > 0).all()


def test_blocks_run_along_the_last_dimension():
    values = torch.rand(3, 5, 2 * BLOCK)
    codes, scales = encode(values, signed=False)
    assert codes.shape == values.shape
    assert torch.equal(scales, values.view(3, 5, 2, BLOCK).amax(-1))


@triton.jit
def _round_trip_kernel(values_ptr, codes_ptr, scales_ptr, decoded_ptr, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes, scales = encode_block(tl.load(values_ptr + at), SIGNED)
    codes = codes.to(tl.uint8)
    tl.store(codes_ptr + at, codes)
    tl.store(scales_ptr + tl.arange(0, 64)[:, None], scales)
    tl.store(decoded_ptr + at, decode_block(codes, scales, SIGNED))


@pytest.mark.kernel
@pytest.mark.parametrize("signed", [True, False])
def test_the_kernel_encodes_and_decodes_as_torch_does(signed):
    values = wide_ranging(signed).to(DEVICE)
    codes, scales, decoded = torch.empty_like(values, dtype=torch.uint8), values.new_empty(64), torch.empty_like(values)
    _round_trip_kernel[(1,)](values, codes, scales, decoded, SIGNED=signed, BLOCK=BLOCK, num_warps=8)
    expected, expected_scales = encode(values, signed)
    assert torch.equal(scales, expected_scales.flatten())
    apart = (codes.int() - expected.int()).abs()
    assert apart.max() <= 1  # one rounding, where a number lies between two codes
    assert (apart > 0).float().mean() < 1e-3
    torch.testing.assert_close(decoded, decode(codes, scales[:, None], signed), rtol=1e-6, atol=0.0)
