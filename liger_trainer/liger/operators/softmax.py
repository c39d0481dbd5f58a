"""Softmax, sparsemax and multi-token attention; kernels and the operator of the first two are in `row_softmax`.

Sparsemax (arXiv 1602.02068) is the point of the probability simplex nearest to the input, which is sparse.

Multi-token attention (arXiv 2504.00927): a convolution over queries, keys and heads of causal attention weights.

    out = causal(conv2d(softmax(scores with -inf above the diagonal)))          causal: 0 above the diagonal

The mask is part of the kernel of softmax or sparsemax: scores above the diagonal are not read, need no masking pass,
and get a gradient of 0. Bytes moved by that kernel, in `row_softmax`, for n scores of b bytes: 1.5*n*b forward, 2*n*b
backward. The convolution is torch's (cuDNN), and zeros are written over its result above the diagonal. Saved for
backward: the attention weights and the convolution's weight; in half precision also the scores, from which the backward
of the softmax recomputes the weights unrounded, as after ``softmax(scores, dtype=torch.float32)``.

Shapes: x and y (..., V); scores (batch, heads, tokens, tokens).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_trainer.kernels.runtime import reference_of, use_triton
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
    if use_triton(x):
        return row_softmax(x, False, False)
    return torch.softmax(x, dim=-1, dtype=x.dtype)  # autocast would return fp32


softmax_reference = reference_of(softmax, "use_triton")


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
    if use_triton(x):
        if dim in (-1, x.dim() - 1):
            return row_softmax(x, True, False)
        return row_softmax(x.movedim(dim, -1), True, False).movedim(-1, dim)
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


sparsemax_reference = reference_of(sparsemax, "use_triton")


def multi_token_attention(
    scores: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    sparse: bool = False,
) -> torch.Tensor:
    """Causal attention weights of `scores`, convolved over queries, keys and heads.

    Args:
        scores: Attention scores before the mask, (batch, heads, length, length) or (heads, length, length), of any
            length. float16, bfloat16 or float32 for the kernel; other floating dtypes run the reference. Scores above
            the diagonal are not read and get a gradient of 0.
        weight: Weight of the convolution, (out_heads, heads / groups, height, width), of the dtype of `scores`.
        bias: (out_heads,), or None.
        stride: As in ``torch.nn.functional.conv2d``, as are `padding`, `dilation` and `groups`.
        padding: Zeros around the attention weights; ``(kernel - 1) * dilation / 2`` preserves the length.
        dilation: Distance between the taps of the convolution.
        groups: Number of groups of heads that are convolved separately.
        sparse: Sparsemax instead of softmax.

    Returns:
        (batch, out_heads, rows, columns), with 0 above its diagonal.

    Raises:
        ValueError: If `scores` is not floating, or has another shape.
    """
    if scores.dim() not in (3, 4) or scores.shape[-1] != scores.shape[-2] or not scores.is_floating_point():
        raise ValueError(
            f"`scores` has shape {tuple(scores.shape)} and dtype {scores.dtype}; give floats of "
            "(batch, heads, length, length), with or without the batch."
        )
    if use_triton(scores):
        probabilities = row_softmax(scores, sparse, True)
    else:
        masked = scores.masked_fill(torch.ones_like(scores[:1], dtype=torch.bool).triu(1), float("-inf"))
        wide = torch.promote_types(scores.dtype, torch.float32)
        probabilities = sparsemax_reference(masked) if sparse else masked.softmax(-1, dtype=wide).to(scores.dtype)
    return F.conv2d(probabilities, weight, bias, stride, padding, dilation, groups).tril_()


multi_token_attention_reference = reference_of(multi_token_attention, "use_triton")
