"""The matrix products of linear layers with low-rank adapters (LoRA, arXiv 2106.09685), forward and backward.

Of layers i that share the input x, with adapters j of layer i(j)::

    z_j = (m_j * x) @ A_j^T             y_i = x @ W_i^T + b_i + sum over j of s_j z_j @ B_j^T

    dz_j = s_j dy_i @ B_j               dx  = sum over i of dy_i @ W_i + sum over j of m_j * (dz_j @ A_j)
    dB_j = s_j dy_i^T @ z_j             dA_j = dz_j^T @ (m_j * x)

m_j is the dropout mask of an adapter, or 1; the 1 / (1 - p) that goes with it is part of s_j. Without masks all A_j are
one matrix: one thin product for every z, and one for every dA. Sums are made by the matmuls themselves, which add to
what is there, so that no term is a tensor of its own.

Everything is multiplied in the dtype of x, to which weights and adapters are cast; x never is. Gradients of the
parameters leave the matmul in fp32 where the parameter is wider than x. A W_i may be in 4 bits (`_base_weights`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from liger_trainer.kernels.lora.base_weights import Weight, linear, sum_of_products
from liger_trainer.kernels.matmul import matmul_into


class Adapter(NamedTuple):
    """One adapter of one of the layers."""

    a: torch.Tensor
    b: torch.Tensor
    layer: int
    scaling: float
    mask: torch.Tensor | None
    columns: slice  # of z


def adapters_of(
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    layers: Sequence[int],
    scalings: Sequence[float],
    masked: Sequence[bool],
) -> list[Adapter]:
    """The adapters out of an operator's flat arguments; `masks` holds one for each that is `masked`."""
    remaining, start, adapters = iter(masks), 0, []
    for a, b, layer, scaling, has_mask in zip(lora_a, lora_b, layers, scalings, masked):
        mask = next(remaining).reshape(-1, a.shape[1]) if has_mask else None
        adapters.append(Adapter(a, b, layer, scaling, mask, slice(start, start + a.shape[0])))
        start += a.shape[0]
    return adapters


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(tokens, features)."""
    return x.reshape(-1, x.shape[-1])


def _dropped(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    return x if mask is None else x * mask


def _stacked_a(adapters: Sequence[Adapter], dtype: torch.dtype) -> torch.Tensor:
    matrices = [adapter.a for adapter in adapters]
    return (matrices[0] if len(matrices) == 1 else torch.cat(matrices)).to(dtype)


def _have_masks(adapters: Iterable[Adapter]) -> bool:
    return any(adapter.mask is not None for adapter in adapters)


def project_down(x: torch.Tensor, adapters: Sequence[Adapter]) -> torch.Tensor:
    """Every z side by side, (tokens, sum of the ranks)."""
    if not adapters:
        return x.new_empty(x.shape[0], 0)
    if not _have_masks(adapters):
        return x @ _stacked_a(adapters, x.dtype).T
    return torch.cat([_dropped(x, each.mask) @ each.a.to(x.dtype).T for each in adapters], dim=1)


def project(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, z: torch.Tensor, adapters: Iterable[Adapter]
) -> torch.Tensor:
    """``y`` of one layer, whose adapters these are."""
    y = linear(x, weight, bias)
    for adapter in adapters:
        y.addmm_(z[:, adapter.columns], adapter.b.to(x.dtype).T, alpha=adapter.scaling)
    return y


def low_rank_gradient(dy: Sequence[torch.Tensor], adapters: Sequence[Adapter]) -> torch.Tensor:
    """Every dz side by side, (tokens, sum of the ranks)."""
    dz = dy[0].new_empty(dy[0].shape[0], adapters[-1].columns.stop if adapters else 0)
    for adapter in adapters:
        upstream, out = dy[adapter.layer], dz[:, adapter.columns]
        torch.addmm(out, upstream, adapter.b.to(dz.dtype), beta=0, alpha=adapter.scaling, out=out)
    return dz


def input_gradient(
    dy: Sequence[torch.Tensor], weights: Sequence[Weight], dz: torch.Tensor, adapters: Sequence[Adapter]
) -> torch.Tensor:
    """dx, (tokens, in_features)."""
    dx = sum_of_products(dy, weights)
    if not adapters:
        return dx
    if not _have_masks(adapters):
        return dx.addmm_(dz, _stacked_a(adapters, dz.dtype))
    for adapter in adapters:
        columns, a = dz[:, adapter.columns], adapter.a.to(dz.dtype)
        if adapter.mask is None:
            dx.addmm_(columns, a)
        else:
            dx.add_((columns @ a).mul_(adapter.mask))
    return dx


def low_rank_input_gradient(
    dz: torch.Tensor, adapters: Sequence[Adapter], max_rank: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What the adapters add to dx, as factors whose product it is; None where there are masks, or more ranks."""
    if _have_masks(adapters) or dz.shape[1] > max_rank:
        return None
    return dz, torch.cat([adapter.a for adapter in adapters])


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, scaling: float = 1.0) -> torch.Tensor:
    """``scaling * left.T @ right`` for a parameter of `dtype`: in fp32 where that is wider than the operands."""
    result = left.new_empty(left.shape[1], right.shape[1], dtype=torch.promote_types(dtype, left.dtype))
    if result.dtype == left.dtype:  # scaled before it is rounded
        torch.addmm(result, left.T, right, beta=0, alpha=scaling, out=result)
    else:
        matmul_into(result, left.T, right)
        result.mul_(scaling)
    return result.to(dtype)


def widest(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that all of `tensors` fit into."""
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


def a_gradients(dz: torch.Tensor, x: torch.Tensor, adapters: Sequence[Adapter]) -> torch.Tensor:
    """DA of all adapters below each other, (sum of the ranks, in_features), in the widest of their dtypes."""
    dtype = widest([adapter.a for adapter in adapters])
    if not _have_masks(adapters):
        return product(dz, x, dtype)
    return torch.cat([product(dz[:, each.columns], _dropped(x, each.mask), dtype) for each in adapters])


def b_gradient(dy: Sequence[torch.Tensor], z: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """DB of one adapter, (out_features, rank)."""
    return product(dy[adapter.layer], z[:, adapter.columns], adapter.b.dtype, adapter.scaling)
