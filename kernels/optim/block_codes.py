"""Numbers in 8 bits, each a fraction of the largest magnitude in its block of 256 (block-wise quantisation).

The codes are those of the dynamic exponent data type (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861), with
binades in threes in place of decades, so that exponents are integer arithmetic. With E groups, group e = 1 ... E covers
the fractions in [8^(e-1-E), 8^(e-E)) with 2^e codes at even distances:

    code = 2^e - 1 + j,  j = 0 ... 2^e - 1        fraction = 8^(e-E) (7/8 (1 + (j + 1/2) / 2^e) - 3/4)

that is, the centre of the j-th of 2^e equal bins. Code 0 is 0, and 2^(E+1) - 1 is 1, so the largest of a block is
exact. Unsigned numbers have E = 7, 256 codes, fractions from 1.3e-6; signed ones have E = 6, the sign in bit 7,
fractions from 1.0e-5. The error is at most 0.35 % (signed 0.7 %) of the block's largest number and, between an eighth
of that and itself, 2.8 % (signed 5.5 %) of the number.

A fraction below the first group becomes 0 in signed blocks if it is less than half of the first code. In unsigned
blocks, which hold the second moment of Adam, no number other than 0 does: an update divides by its root.

Encoding what was decoded gives the same codes and scales.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import tl, triton

BLOCK = 256
"""Numbers with one scale; consecutive, in the last dimension."""

_LARGEST_BELOW_ONE = tl.constexpr(0x3F7FFFFF)  # the bits of 1 - 2^-24
_LEAST_SCALE = tl.constexpr(2.0**-100)  # the inverse of a smaller one could overflow: such a block is 0


@triton.jit
def encode_block(values, SIGNED: tl.constexpr):
    """The codes (uint8) and scales of the rows of `values`, an fp32 tile of BLOCK columns."""
    GROUPS: tl.constexpr = 6 if SIGNED else 7
    magnitude = tl.abs(values) if SIGNED else values
    scale = tl.max(magnitude, axis=1)
    scale = tl.where(scale >= _LEAST_SCALE, scale, 0.0)
    inverse = tl.where(scale > 0.0, 1.0 / scale, 0.0)
    fraction = magnitude * inverse[:, None]

    bits = tl.minimum(fraction.to(tl.int32, bitcast=True), _LARGEST_BELOW_ONE)
    below = tl.minimum(((126 - (bits >> 23)) * 43) >> 7, GROUPS - 1)  # groups below the last: a third of the exponent
    in_last = (bits + below * (3 << 23)).to(tl.float32, bitcast=True)  # times 8^below
    mantissa = tl.maximum(in_last * (8.0 / 7.0) + 6.0 / 7.0, 1.0).to(tl.int32, bitcast=True)
    mantissa = tl.minimum(mantissa, 0x3FFFFFFF)  # below 2
    code = (((mantissa & 0x7FFFFF) | 0x800000) >> (23 - GROUPS + below)) - 1

    code = tl.where(fraction > 1.0 - 0.4375 / (2 << GROUPS), (2 << GROUPS) - 1, code)
    if SIGNED:
        code = tl.where(values < 0.0, code | 128, code)
        code = tl.where(fraction < 0.5 * 0.34375 * 8.0 ** (1 - GROUPS), 0, code)
    else:
        code = tl.where(fraction > 0.0, code, 0)
    return code.to(tl.uint8), scale


@triton.jit
def decode_block(codes, scale, SIGNED: tl.constexpr):
    """The fp32 numbers of a tile of codes, given the scales of its rows."""
    GROUPS: tl.constexpr = 6 if SIGNED else 7
    code = codes.to(tl.int32)
    if SIGNED:
        code = code & 127
    bits = (code.to(tl.float32) + 1.5).to(tl.int32, bitcast=True)  # 2^e (1 + (j + 1/2) / 2^e)
    mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    in_last = mantissa * 0.875 - 0.75
    below = (127 + GROUPS) - (bits >> 23)
    fraction = (in_last.to(tl.int32, bitcast=True) - below * (3 << 23)).to(tl.float32, bitcast=True)
    fraction = tl.where(code == (2 << GROUPS) - 1, 1.0, fraction)
    fraction = tl.where(code == 0, 0.0, fraction)
    if SIGNED:
        fraction = tl.where(codes > 127, -fraction, fraction)
    return fraction * scale[:, None]


def encode(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes numbers in plain torch, with the same bits as the kernels.

    Args:
        values: fp32, of shape (..., K) with K a multiple of 256; 0 or more unless `signed`.
        signed: Whether a bit of each code is the sign.

    Returns:
        The codes, uint8, of the shape of `values`; and the scales, fp32, of shape (..., K / 256).
    """
    groups = 6 if signed else 7
    blocks = values.reshape(-1, BLOCK)
    magnitude = blocks.abs()
    scale = magnitude.amax(1)
    scale = torch.where(scale >= _LEAST_SCALE.value, scale, 0.0)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    fraction = magnitude * inverse[:, None]

    bits = fraction.view(torch.int32).clamp(max=_LARGEST_BELOW_ONE.value)
    below = (((126 - (bits >> 23)) * 43) >> 7).clamp(max=groups - 1)
    in_last = (bits + below * (3 << 23)).view(torch.float32)
    mantissa = (in_last * (8.0 / 7.0) + 6.0 / 7.0).clamp(min=1.0).view(torch.int32).clamp(max=0x3FFFFFFF)
    code = (((mantissa & 0x7FFFFF) | 0x800000) >> (23 - groups + below)) - 1

    code = torch.where(fraction > 1.0 - 0.4375 / (2 << groups), (2 << groups) - 1, code)
    if signed:
        code = torch.where(blocks < 0, code | 128, code)
        code = torch.where(fraction < 0.5 * 0.34375 * 8.0 ** (1 - groups), 0, code)
    else:
        code = torch.where(fraction > 0, code, 0)
    return code.to(torch.uint8).view(values.shape), scale.view(*values.shape[:-1], -1)


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 numbers of what [`encode`] returns."""
    table = fractions(signed).to(codes.device)
    blocks = table[codes.reshape(-1, BLOCK).int()]
    return (blocks * scales.reshape(-1, 1)).view(codes.shape)


def fractions(signed: bool) -> torch.Tensor:
    """The fraction that each of the 256 codes stands for, fp32."""
    groups = 6 if signed else 7
    code = torch.arange(2 << groups)
    group = (code + 1).log2().floor()
    fraction = 8.0 ** (group - groups) * (0.875 * (code + 1.5) / 2**group - 0.75)
    fraction[0], fraction[-1] = 0.0, 1.0
    return torch.cat([fraction, -fraction]) if signed else fraction
