"""How kernels read rows of logits: where a row lies, its tiles, the transform of a logit, running sums of exponentials.

A logit x, with its bias added, is transformed to z = softcap * tanh(x * logit_scale / softcap) / temperature, or to
x * logit_scale / temperature without a soft-cap. Kernels work with log2(e) * z, whose exponential is one instruction.

Shapes: N tokens, V vocabulary; logits (N, V), or (B, S, V) of B sequences of S tokens.
"""

from __future__ import annotations

import math

import torch

from liger_trainer.kernels.runtime import next_power_of_2, tl, triton

LOG2E = math.log2(math.e)


def row_view(logits: torch.Tensor) -> torch.Tensor:
    """`logits` as `(N, V)` or `(B, S, V)` with last stride 1; a copy only if its strides do not allow that."""
    if logits.dim() not in (2, 3):
        logits = logits.reshape(-1, logits.shape[-1])
    return logits if logits.stride(-1) == 1 or logits.shape[-1] == 1 else logits.contiguous()


def row_layout(rows: torch.Tensor) -> tuple[int, int, int]:
    """(inner rows, outer stride, inner stride) of `(N, V)` or `(B, S, V)` rows whose last stride is 1."""
    if rows.dim() == 2:
        return max(rows.shape[0], 1), 0, rows.stride(0)
    return max(rows.shape[1], 1), rows.stride(0), rows.stride(1)


@triton.jit
def row_start(ptr, row, inner_rows, outer_stride, inner_stride):
    """The address of row `row` of `ptr`; the other arguments are its `row_layout`."""
    return ptr + (row // inner_rows) * outer_stride + (row % inner_rows) * inner_stride


def row_config(width: int) -> tuple[int, int, int]:
    """Tile width, warps and pipeline stages for rows of `width` columns.

    Eight elements a thread are one 16-byte load in flight and leave registers for the running state; on an H200 wider
    tiles and pipelining were slower at every vocabulary tried, for one pass and for both.
    """
    block = min(4096, max(128, next_power_of_2(width)))
    return block, max(1, block // 256), 1


@triton.jit
def fold(total, value, decay, grows):
    """Adds `value`, weighted by its exponential, to a running sum; the running maximum has just moved where `grows`."""
    return tl.where(grows, total * decay + value, total + value * decay)


@triton.jit
def load_logits(row_ptr, bias_ptr, columns, width, vocab_size, BIAS: tl.constexpr):
    """One tile of logits in fp32; columns from `vocab_size` to `width` are padding that may hold anything."""
    x = tl.load(row_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + columns, mask=columns < vocab_size, other=0.0).to(tl.float32)
    return x


@triton.jit
def transform_logits(x, inner, outer, SOFTCAP: tl.constexpr):
    """log2(e) * z of the logits `x`, and a quarter of the soft-cap's slope (dead code without a soft-cap).

    tanh(a) = 1 - 2 r with r = 1 / (1 + exp(2 a)), and 1 - tanh(a)**2 = 4 (r - r**2). The digits that cancel there are
    small against the cap and against 1, the scales of logits and gradients. r is computed as a square because the
    GPU's reciprocal square root costs less than its division.
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
