"""The inputs of a gated delta rule: a short convolution with SiLU, and queries and keys of length 1.

Formula, for a head u of the convolution's result: q and k are ``u * rsqrt(sum(u^2) + eps)``, v is u.

Shapes: qkv (batch, tokens, 2 key_heads key_dim + value_heads value_dim), the heads of q, then of k, then of v.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.conv.short_conv import check_conv_arguments, short_conv_reference
from liger_trainer.kernels.documents import ROWS, Documents
from liger_trainer.kernels.runtime import reference_of


def delta_inputs(
    qkv: torch.Tensor,
    weight: torch.Tensor,
    *,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    eps: float = 1e-6,
    documents: Documents = ROWS,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a gated delta rule: a short convolution with SiLU, then q and k of length 1.

    Everything is computed in fp32 and rounded once. A document that continues another one begins with its last inputs.

    Args:
        qkv: The projection of shape (batch, tokens, 2 * key_heads * key_dim + value_heads * value_dim): all heads of q,
            then of k, then of v, in any floating dtype. It may be a part of a larger projection.
        weight: Taps of shape (channels, taps), 2 to 8 of them, the last one for the token itself. Any floating dtype.
        key_heads: Heads of q and of k.
        value_heads: Heads of v.
        key_dim: Channels of a head of q and of k.
        value_dim: Channels of a head of v.
        eps: Added to the sum of the squares of a head of q and of k.
        documents: The documents of the batch; by default each row is one.

    Returns:
        q and k of shape (batch, tokens, key_heads, key_dim) and v of shape (batch, tokens, value_heads, value_dim),
        contiguous, in the dtype of `qkv`, 0 for tokens of no document.

    Raises:
        ValueError: If the heads are not the channels of `qkv`, a shape, dtype or device does not fit it, or there are
            fewer than 2 taps or more than 8.
    """
    check_conv_arguments("delta_inputs", qkv, weight, None)
    widths = key_heads * key_dim, key_heads * key_dim, value_heads * value_dim
    if sum(widths) != qkv.shape[-1]:
        raise ValueError(
            f"`qkv` of delta_inputs has {qkv.shape[-1]} channels, but {key_heads} heads of {key_dim} for q and for k "
            f"and {value_heads} of {value_dim} for v have {sum(widths)}."
        )
    wide = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    mixed = short_conv_reference(wide, weight, activation="silu", documents=documents)
    assert isinstance(mixed, torch.Tensor)
    q, k, v = mixed.split(widths, -1)
    q, k = (each.unflatten(-1, (key_heads, key_dim)) for each in (q, k))
    q, k = (each * torch.rsqrt(each.pow(2).sum(-1, keepdim=True) + eps) for each in (q, k))
    q, k, v = (each.to(qkv.dtype).contiguous() for each in (q, k, v.unflatten(-1, (value_heads, value_dim))))
    return q, k, v


delta_inputs_reference = reference_of(delta_inputs, "check_conv_arguments")
