"""How a row kernel reads logits: bias, scale, soft-cap and temperature, in units of bits.

The transform is z = softcap * tanh(x * logit_scale / softcap) / temperature, or x * logit_scale / temperature without a
soft-cap. Kernels take log2(e) * z, whose exponential is one instruction.
"""

from __future__ import annotations

import math

from liger_trainer.kernels.runtime import tl, triton

LOG2E = math.log2(math.e)


@triton.jit
def load_logits(row_ptr, bias_ptr, columns, width, vocab_size, BIAS: tl.constexpr):
    """One tile of logits in fp32; columns from `vocab_size` to `width` are padding that may hold anything."""
    x = tl.load(row_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + columns, mask=columns < vocab_size, other=0.0).to(tl.float32)
    return x


@triton.jit
def transform_logits(x, inner, outer, SOFTCAP: tl.constexpr):
    """log2(e) * z of the logits `x`, and a quarter of the soft-cap's slope (unused, and then removed, without one).

    tanh(a) = 1 - 2 r with r = 1 / (1 + exp(2 a)), and 1 - tanh(a)**2 = 4 (r - r**2): what cancels there is small beside
    the cap and beside 1, by which logits and gradients are measured. r is a square, as the GPU's reciprocal square root
    costs less than its division.
    """
    z = x * outer
    slope = z
    if SOFTCAP:
        root = tl.math.rsqrt(1.0 + tl.exp2(x * inner))
        r = root * root
        z = outer - 2.0 * outer * r
        slope = r - r * r
    return z, slope


def transform_factors(softcap: float | None, logit_scale: float, temperature: float) -> tuple[float, float, float]:
    """`inner` and `outer` of `transform_logits`, and the factor of its slope in dz/dx."""
    scale = logit_scale / temperature
    if softcap is None:
        return 0.0, scale * LOG2E, scale
    return 2.0 * logit_scale / softcap * LOG2E, softcap / temperature * LOG2E, 4.0 * scale
