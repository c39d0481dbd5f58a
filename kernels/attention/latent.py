"""Keys and values of latent attention (MLA) out of one projection, and back.

For every token and head h, with the projection's result kv_h = [n_h, v_h] and a rotated key r that all heads share::

    k_h = [n_h, r]          dkv_h = [dk_h[:nope], dv_h]          dr = sum over h of dk_h[nope:]

k is new memory; v is a view of kv. The backward is one pass, whose sum over the heads is in fp32 and in one order.
What copies into slices of k cost autograd is a clone of dk for each slice and a sum of two padded gradients of kv.

Bytes moved for a head, in numbers: 2 nope + rope forward, 2 (nope + value) + rope backward. Nothing is saved.

Shapes: kv (batch, seq, heads, nope + value), r (batch, seq, rope), k (batch, seq, heads, nope + rope), v (batch, seq,
heads, value).

Queries need no function of their own: `rope` rotates their last columns (its `first`).
"""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.kernels.attention.latent_kernels import launch_collapse, launch_expand
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import reference_of, use_triton


@operator("liger_trainer::expand_keys")
def _keys(kv: torch.Tensor, r: torch.Tensor, nope: int) -> torch.Tensor:
    """K of kv and r."""
    k = kv.new_empty(*kv.shape[:-1], nope + r.shape[-1])
    launch_expand(kv, r, k)
    return k


@operator("liger_trainer::collapse_keys")
def _collapsed(dk: torch.Tensor, dv: torch.Tensor, nope: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of kv, and of r in `dtype`."""
    dkv = dk.new_empty(*dk.shape[:-1], nope + dv.shape[-1])
    dr = dk.new_empty(*dk.shape[:2], dk.shape[-1] - nope, dtype=dtype)
    launch_collapse(dk, dv, dkv, dr)
    return dkv, dr


class _Expand(torch.autograd.Function):
    """k and v of kv and r. An operator of torch may not return a view of its argument, as v is."""

    @staticmethod
    def forward(ctx: Any, kv: torch.Tensor, r: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.nope, ctx.dtype = nope, r.dtype
        return _keys(kv, r, nope), kv[..., nope:].detach()

    @staticmethod
    def backward(ctx: Any, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dkv, dr = _Collapse.apply(dk, dv, ctx.nope, ctx.dtype)
        return dkv, dr, None


class _Collapse(torch.autograd.Function):
    """The transpose of `_Expand`, whose own is `_Expand` again."""

    @staticmethod
    def forward(
        ctx: Any, dk: torch.Tensor, dv: torch.Tensor, nope: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.nope = nope
        return _collapsed(dk, dv, nope, dtype)

    @staticmethod
    def backward(ctx: Any, dkv: torch.Tensor, dr: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dk, dv = _Expand.apply(dkv, dr, ctx.nope)
        return dk, dv, None, None


def _check(kv: torch.Tensor, r: torch.Tensor, nope: int) -> bool:
    """Whether the kernel runs for these arguments of `expand_keys`.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit together.
    """
    if kv.dim() != 4 or r.dim() != 3 or kv.shape[:2] != r.shape[:2]:
        raise ValueError(
            f"`kv` is {tuple(kv.shape)} and `r` is {tuple(r.shape)}; they must be (batch, seq, heads, nope + value) "
            "and (batch, seq, rope)."
        )
    if not 0 < nope < kv.shape[-1] or not r.shape[-1]:
        raise ValueError(
            f"`nope` is {nope}, a head of `kv` has {kv.shape[-1]} columns and `r` has {r.shape[-1]}; `nope` must leave "
            "some of the first for v, and no part of a key may be empty."
        )
    if not kv.is_floating_point() or not r.is_floating_point():
        raise ValueError(f"`kv` has dtype {kv.dtype} and `r` {r.dtype}; give floating point tensors.")
    if kv.device != r.device:
        raise ValueError(f"`kv` is on {kv.device}, but `r` is on {r.device}; move one to the other.")
    return use_triton(kv) and use_triton(r)


def expand_keys(kv: torch.Tensor, r: torch.Tensor, nope: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of latent attention (DeepSeek-V2, arXiv 2405.04434, equations 10 to 17) in one pass.

    Args:
        kv: The up-projection of the latents, (batch, seq, heads, nope + value), of any strides and floating dtype.
        r: The rotated key that all heads share, (batch, seq, rope), of any strides and floating dtype. It is rounded to
            the dtype of `kv`.
        nope: How many columns of a head of `kv` are of the key; the others are the value.

    Returns:
        k, (batch, seq, heads, nope + rope), contiguous, and v, (batch, seq, heads, value), which is a view of `kv`:
        who writes to one writes to the other. Both of the dtype of `kv`.

    Raises:
        ValueError: If shapes, dtypes or devices do not fit together.
    """
    if _check(kv, r, nope):
        k, v = _Expand.apply(kv, r, nope)
        return k, v
    of_head = r.to(kv.dtype).unsqueeze(2).expand(-1, -1, kv.shape[2], -1)
    return torch.cat((kv[..., :nope], of_head), dim=-1), kv[..., nope:]


expand_keys_reference = reference_of(expand_keys, "_check")
