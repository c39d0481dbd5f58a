"""Sparsemax (arXiv 1602.02068): the point of the probability simplex nearest to the input, which is sparse.

The threshold is found without sorting, by Newton's method with the row in registers; the formulas, the kernels and the
operator are in `row_softmax`.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.runtime import use_triton
from liger_trainer.liger.operators.row_softmax import row_softmax


def sparsemax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``max(x - tau, 0)`` along `dim`, with the threshold tau for which it sums to 1.

    Entries of -inf give 0 as long as the row has a finite entry; a row with a NaN or +inf, or of -inf alone, is NaN.
    Only the support, the entries whose result is more than 0, gets a gradient.

    Args:
        x: Any shape with at least one dimension. float16, bfloat16 or float32 for the kernel, which computes in
            float32; other floating dtypes run the reference. A tensor that is not contiguous along `dim` is copied.
        dim: The dimension that sums to 1.

    Returns:
        A new tensor of the shape and dtype of `x`, contiguous once `dim` is moved to the end.

    Raises:
        ValueError: If `x` is not floating, has no dimensions, or has no dimension `dim`.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ValueError(f"`x` of sparsemax has shape {tuple(x.shape)} and dtype {x.dtype}; give floats of (..., n).")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"`dim` of sparsemax is {dim}; `x` of shape {tuple(x.shape)} has {x.dim()} dimensions.")
    if not use_triton(x):
        return sparsemax_reference(x, dim)
    if dim in (-1, x.dim() - 1):
        return row_softmax(x, True, False)
    return row_softmax(x.movedim(dim, -1), True, False).movedim(-1, dim)


def sparsemax_reference(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`sparsemax` in plain torch, by sorting; computed in float32, or float64 for float64 inputs."""
    if x.shape[dim] == 0:
        return torch.empty_like(x)
    z = x.movedim(dim, -1).to(torch.promote_types(x.dtype, torch.float32))
    z = z - z.amax(-1, keepdim=True).detach()
    ordered = z.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1.0
    count = torch.arange(1, z.shape[-1] + 1, device=z.device, dtype=z.dtype)
    size = (ordered * count > excess).sum(-1, keepdim=True).clamp(min=1)
    tau = excess.gather(-1, size - 1) / size
    return torch.relu(z - tau).movedim(-1, dim).to(x.dtype)
