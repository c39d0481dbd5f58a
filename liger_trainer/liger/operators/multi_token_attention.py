"""Multi-token attention (arXiv 2504.00927): a convolution over queries, keys and heads of causal attention weights.

    out = causal(conv2d(softmax(scores with -inf above the diagonal)))          causal: 0 above the diagonal

The mask is part of the kernel of softmax or sparsemax: scores above the diagonal are not read, need no masking pass,
and get a gradient of 0. Bytes moved by that kernel, in `row_softmax`, for n scores of b bytes: 1.5*n*b forward, 2*n*b
backward. The convolution is torch's (cuDNN), and zeros are written over its result above the diagonal. Saved for
backward: the attention weights and the convolution's weight; in half precision also the scores, from which the backward
of the softmax recomputes the weights unrounded, as after ``softmax(scores, dtype=torch.float32)``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from liger_trainer.kernels.runtime import use_triton
from liger_trainer.liger.operators.row_softmax import causal_softmax, row_softmax
from liger_trainer.liger.operators.sparsemax import sparsemax_reference


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
    if not use_triton(scores):
        probabilities = _causal_reference(scores, sparse)
    else:
        probabilities = row_softmax(scores, True, True) if sparse else causal_softmax(scores)
    return F.conv2d(probabilities, weight, bias, stride, padding, dilation, groups).tril_()


def _causal_reference(scores: torch.Tensor, sparse: bool) -> torch.Tensor:
    above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    masked = scores.masked_fill(above, float("-inf"))
    if sparse:
        return sparsemax_reference(masked)
    return torch.softmax(masked, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def multi_token_attention_reference(
    scores: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    sparse: bool = False,
) -> torch.Tensor:
    """`multi_token_attention` in plain torch."""
    return F.conv2d(_causal_reference(scores, sparse), weight, bias, stride, padding, dilation, groups).tril()
