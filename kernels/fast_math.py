"""A base-2 logarithm that is one instruction on NVIDIA GPUs.

There ``tl.log2`` is a library routine of some 25 instructions with a branch for each element, which makes kernels that
take logarithms of whole rows compute-bound; ``lg2.approx`` is off by at most 2**-22, relative or, near 1, absolute.
Elsewhere ``tl.log2`` is the hardware's own.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import INTERPRETED, tl, triton


def has_lg2(tensor: torch.Tensor) -> bool:
    """Whether kernels on `tensor`'s device may use PTX, to be passed as `LG2`."""
    return tensor.device.type == "cuda" and torch.version.hip is None and not INTERPRETED


@triton.jit
def log2(x, LG2: tl.constexpr):
    """log2 of a tensor of fp32, at least that of the smallest normal number; for NaN it may be anything."""
    x = tl.maximum(x, 1.1754943508222875e-38)
    if LG2:
        return tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:  # noqa: RET505 (a compile-time branch)
        return tl.log2(x)
