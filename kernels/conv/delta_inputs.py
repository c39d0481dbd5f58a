"""The inputs of a gated delta rule: a short convolution with SiLU, and queries and keys of length 1.

Formula, for a head u of the convolution's result: q and k are ``u * rsqrt(sum(u^2) + eps)``, v is u.
With r that factor, the gradient of u is ``r * (dq - q * sum(dq * q))``.

One pass each way: forward reads the projection and writes q, k and v (4 bytes per element in bf16); backward reads it
and dq, dk and dv and writes its gradient (6 bytes). Saved for backward: the projection alone.

Shapes: qkv (batch, tokens, 2 key_heads key_dim + value_heads value_dim), the heads of q, then of k, then of v.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.autograd import input_gradients, refuse_second_derivative, where_needed
from liger_trainer.kernels.conv.launch import Conv, empty_result, launch_backward, launch_forward, save, saved
from liger_trainer.kernels.conv.short_conv import check_conv_arguments, short_conv_reference
from liger_trainer.kernels.documents import ROWS, Documents
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import reference_of


@operator("liger_trainer::delta_inputs")
def _delta_inputs(
    qkv: torch.Tensor, weight: torch.Tensor, documents: Documents, key_width: int, key_dim: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    results = []
    for part, conv in _parts(key_width, key_dim, eps):
        taps = weight[part]
        result = empty_result(qkv, len(taps), documents)
        launch_forward(qkv[..., part], taps, None, None, result, documents, conv)
        results.append(result)
    q, k, v = results
    return q, k, v


@operator("liger_trainer::delta_inputs_backward")
def _delta_inputs_backward(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    qkv: torch.Tensor,
    weight: torch.Tensor,
    documents: Documents,
    key_width: int,
    key_dim: int,
    eps: float,
    needed: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    dqkv = empty_result(qkv, len(weight), documents)
    parts, needed = _parts(key_width, key_dim, eps), [needed[1], False, False]
    return dqkv, launch_backward([dq, dk, dv], qkv, weight, None, None, dqkv, documents, parts, needed)[0]


def _parts(key_width: int, key_dim: int, eps: float) -> list[tuple[slice, Conv]]:
    """The channels of q, k and v, and what is done to them."""
    normed = Conv(silu=True, head=key_dim, eps=eps)
    q, k, v = slice(key_width), slice(key_width, 2 * key_width), slice(2 * key_width, None)
    return [(q, normed), (k, normed), (v, Conv(silu=True))]


refuse_second_derivative(_delta_inputs_backward, "delta_inputs")


def _setup_context(ctx, inputs, output):
    *tensors, documents, ctx.key_width, ctx.key_dim, ctx.eps = inputs
    save(ctx, documents, *tensors)


def _backward(ctx, dq, dk, dv):
    tensors, documents = saved(ctx)
    needed = list(ctx.needs_input_grad[:2])
    gradients = _delta_inputs_backward(dq, dk, dv, *tensors, documents, ctx.key_width, ctx.key_dim, ctx.eps, needed)
    return input_gradients(ctx, *where_needed(needed, *gradients))


_delta_inputs.register_autograd(_backward, setup_context=_setup_context, materialize_grads=True)


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
    on_triton = check_conv_arguments("delta_inputs", qkv, weight, None)
    widths = key_heads * key_dim, key_heads * key_dim, value_heads * value_dim
    if sum(widths) != qkv.shape[-1]:
        raise ValueError(
            f"`qkv` of delta_inputs has {qkv.shape[-1]} channels, but {key_heads} heads of {key_dim} for q and for k "
            f"and {value_heads} of {value_dim} for v have {sum(widths)}."
        )
    if on_triton:
        q, k, v = _delta_inputs(qkv, weight, documents, widths[0], key_dim, eps)
        heads = (key_heads, key_dim), (key_heads, key_dim), (value_heads, value_dim)
        q, k, v = (each.unflatten(-1, shape) for each, shape in zip((q, k, v), heads))
        return q, k, v
    wide = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
    mixed = short_conv_reference(wide, weight, activation="silu", documents=documents)
    assert isinstance(mixed, torch.Tensor)
    q, k, v = mixed.split(widths, -1)
    q, k = (each.unflatten(-1, (key_heads, key_dim)) for each in (q, k))
    q, k = (each * torch.rsqrt(each.pow(2).sum(-1, keepdim=True) + eps) for each in (q, k))
    q, k, v = (each.to(qkv.dtype).contiguous() for each in (q, k, v.unflatten(-1, (value_heads, value_dim))))
    return q, k, v


delta_inputs_reference = reference_of(delta_inputs, "check_conv_arguments")
