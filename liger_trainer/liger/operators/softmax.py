"""Softmax over the last dimension, one pass forward and one backward.

The formulas, the kernels and the operator are in `row_softmax`.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import use_triton
from liger_trainer.liger.operators.row_softmax import row_softmax


def softmax(x: torch.Tensor) -> torch.Tensor:
    """``exp(x) / sum(exp(x))`` over the last dimension, of any length.

    Args:
        x: Any shape with at least one dimension. float16, bfloat16 or float32 for the kernel, which computes in
            float32; other floating dtypes run the reference. A tensor whose last dimension is not contiguous is copied.

    Returns:
        A new contiguous tensor of the shape and dtype of `x`. As in torch, a row is NaN if it holds a NaN or +inf, or
        only -inf.

    Raises:
        ValueError: If `x` is not floating or has no dimension.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"`x` of softmax has shape {tuple(x.shape)} and dtype {x.dtype}; give floats of (..., n).")
    return row_softmax(x, False, False) if use_triton(x) else softmax_reference(x)


def softmax_reference(x: torch.Tensor) -> torch.Tensor:
    """`softmax` in plain torch."""
    return torch.softmax(x, dim=-1)
