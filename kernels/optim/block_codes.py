"""Numbers in 8 bits, each a fraction of the largest magnitude in its block of 256 (block-wise quantisation).

The codes are a dynamic exponent data type (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861) with factors of 8 in
place of decades, so that exponents are integer arithmetic. Group e = 1 ... E has 2^e fractions at even distances, up to
8^(e-E):

    fraction = 8^(e-E) (1/8 + 7/8 j / 2^e),  j = 1 ... 2^e        code = 2^e - 2 + j

As code + 2 = 2^e (1 + j / 2^e), its fp32 exponent is the group; where j is 2^e, the next group gives the same number
for j = 0. With f = code + 2 and k = E - e, this is all that the kernels compute:

    fraction = 7/8 4^-k 2^-E f - 3/4 8^-k
    f = round(8/7 4^k 2^E fraction + 6/7 2^(E-k))  with k = floor(-log8(fraction))

The largest of a block is exact, its fraction being 1. Signed numbers have E = 6 and code 0 for 0, and are stored as 128
plus or minus their code. Unsigned ones have E = 7, and code 0 is 8^-7: they hold the second moment of Adam, by whose
root an update is divided, so none is rounded to 0, but in a block that is all below 2^-100. An error is at most 0.35 %
(signed 0.7 %) of the block's largest number, and 2.8 % (signed 5.5 %) of a number that is an eighth of that or more.
Encoding what was decoded gives the same codes and scales.

Shapes: (..., K) numbers, (..., K / 256) scales.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import tl, triton

BLOCK = 256
"""Numbers with one scale; consecutive, in the last dimension."""

_LEAST_SCALE = tl.constexpr(2.0**-100)  # the inverse of a smaller one could overflow: such a block is 0
_TO_INTEGER = tl.constexpr(2.0**23)  # added to a number, it rounds it and leaves it in the last bits of the sum
_EXPONENT = tl.constexpr(1 << 23)  # of an fp32 number: 1 more of it
_SIGN = tl.constexpr(-(1 << 31))
_8_7 = tl.constexpr(0x3F924925)  # the bits of 8/7, 6/7, 7/8 and 3/4
_6_7 = tl.constexpr(0x3F5B6DB7)
_7_8 = tl.constexpr(0x3F600000)
_3_4 = tl.constexpr(0x3F400000)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_block(values, SIGNED: tl.constexpr):
    """Codes of a tile of fp32 numbers with BLOCK columns, in the last byte of int32, and the scales as a column."""
    GROUPS: tl.constexpr = 6 if SIGNED else 7
    magnitude = tl.abs(values)
    scale = tl.max(magnitude, axis=1, keep_dims=True)
    scale = tl.where(scale >= _LEAST_SCALE, scale, 0.0)
    fraction = magnitude * tl.where(scale > 0.0, 1.0 / scale, 0.0)
    # A third of 126 - exponent, which is -1 for the fraction 1.
    k = tl.minimum((_bits(fraction) >> 23) * -43 + 126 * 43 >> 7, GROUPS - 1)
    slope = _float(k * (2 * _EXPONENT) + (_8_7 + GROUPS * _EXPONENT))
    start = _float(k * (-_EXPONENT) + (_6_7 + GROUPS * _EXPONENT))
    f = fraction * slope + start
    if not SIGNED:
        return _bits(f + (_TO_INTEGER + 254.0)), scale  # - 2 in the last byte
    code = _float((_bits(f - 2.0) & ~_SIGN) | (_bits(values) & _SIGN))
    return _bits(code + (_TO_INTEGER + 128.0)), scale


@triton.jit
def decode_block(codes, scale, SIGNED: tl.constexpr):
    """The fp32 numbers of a tile of codes (uint8), given the scales of its rows as a column."""
    GROUPS: tl.constexpr = 6 if SIGNED else 7
    code = _float(codes.to(tl.int32) | 0x4B000000)  # 2^23 + code
    if SIGNED:
        code -= _TO_INTEGER + 128.0
        f = tl.abs(code) + 2.0
    else:
        f = code - (_TO_INTEGER - 2.0)
    # k = GROUPS - exponent, and the exponent has a bias of 127. The last sum wraps around in 32 bits.
    exponent = _bits(f) >> 23
    slope = _float(exponent * (2 * _EXPONENT) + (_7_8 - (3 * GROUPS + 2 * 127) * _EXPONENT))
    start = _float(exponent * (3 * _EXPONENT) + (_3_4 - (3 * GROUPS + 3 * 127) * _EXPONENT + (1 << 32)))
    fraction = f * slope - start
    if SIGNED:
        fraction = tl.where(code == 0.0, 0.0, fraction)
        fraction = _float(_bits(fraction) | (_bits(code) & _SIGN))
    return fraction * scale


def encode(values: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes numbers in plain torch.

    Where a number lies between two codes, one rounding may give the kernels the other.

    Args:
        values: fp32, of shape (..., K) with K a multiple of 256; 0 or more unless `signed`.
        signed: Whether a bit of each code is the sign.

    Returns:
        The codes, uint8, of the shape of `values`; and the scales, fp32, of shape (..., K / 256).
    """
    groups = 6 if signed else 7
    blocks = values.reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True)
    scale = torch.where(scale >= _LEAST_SCALE.value, scale, 0.0)
    fraction = blocks.abs() * torch.where(scale > 0, 1 / scale, 0.0)
    k = ((126 - (fraction.view(torch.int32) >> 23)) // 3).clamp(max=groups - 1)
    code = (fraction * (8 / 7 * 2**groups * 4.0**k) + 6 / 7 * 2.0 ** (groups - k)).round().int() - 2
    if signed:
        code = 128 + torch.where(blocks < 0, -code, code)
    return code.to(torch.uint8).view(values.shape), scale.view(*values.shape[:-1], values.shape[-1] // BLOCK)


def decode(codes: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The fp32 numbers of what [`encode`] returns."""
    table = fractions(signed).to(codes.device)
    blocks = table[codes.reshape(-1, BLOCK).int()]
    return (blocks * scales.reshape(-1, 1)).view(codes.shape)


def fractions(signed: bool) -> torch.Tensor:
    """The fraction that each of the 256 codes stands for, fp32."""
    groups = 6 if signed else 7
    f = torch.arange(256).sub(128 if signed else 0).abs() + 2.0
    k = groups - f.log2().floor()
    fraction = 7 / 8 * 4.0**-k * 2.0**-groups * f - 3 / 4 * 8.0**-k
    return torch.where(f == 2, 0.0, fraction) * (torch.arange(256) - 128).sign() if signed else fraction
