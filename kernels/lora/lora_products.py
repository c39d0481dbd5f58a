"""The matrix products of linear layers with low-rank adapters (LoRA, arXiv 2106.09685), forward and backward.

Of layers i that share the input x, with adapters j of layer i(j)::

    z_j = (m_j * x) @ A_j^T             y_i = x @ W_i^T + b_i + sum over j of s_j z_j @ B_j^T

    dz_j = s_j dy_i @ B_j               dx  = sum over i of dy_i @ W_i + sum over j of m_j * (dz_j @ A_j)
    dB_j = s_j dy_i^T @ z_j             dA_j = dz_j^T @ (m_j * x)

m_j is the dropout mask of an adapter, or 1; the 1 / (1 - p) of dropout is part of s_j. Without masks all A_j are one
matrix: one thin product for all z, and one for all dA. Sums are accumulated by the matmuls themselves, so that no term
is a tensor of its own.

Everything is multiplied in the dtype of x, to which weights and adapters are cast; x is never cast. Gradients of
parameters leave the matmul in fp32 where the parameter is wider than x. A frozen W_i may be packed: in 4 bits as
bitsandbytes stores it (`nf4.py`), or as a published checkpoint does (`kernels/lowbit/formats.py`). Forward and backward
each decode it for their product, into a buffer that all such products share. Or W_i may be in fp8 with products in fp8
(`kernels/fp8/stored.py`).

Shapes: x (tokens, in_features), dy (tokens, out_features), A (rank, in_features), B (out_features, rank).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn import functional as F

from liger_trainer.kernels.fp8 import stored
from liger_trainer.kernels.fp8.stored import Fp8Weight
from liger_trainer.kernels.lora.nf4 import LAYOUT_LENGTH, NF4Weight, dequantized
from liger_trainer.kernels.lowbit.decode import decoded
from liger_trainer.kernels.lowbit.formats import NUM_STATISTICS, PackedWeight, packed_of
from liger_trainer.kernels.operator import operator
from liger_trainer.kernels.runtime import matmul_into

Weight: TypeAlias = torch.Tensor | NF4Weight | Fp8Weight | PackedWeight
"""The weight of a linear layer: floating point, packed, or in fp8 with products in fp8."""

_FP8_LAYOUT = [-1] * LAYOUT_LENGTH  # in place of the numbers of a weight in 4 bits

# ---------------------------------------------------------------------------------------------------------------------
# Arguments of operators, whose schemas only allow flat lists
# ---------------------------------------------------------------------------------------------------------------------


def flat_weights(weights: Sequence[Weight]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """`weights` as an operator takes them: a tensor each, and the other tensors and the numbers of quantised ones."""
    tensors, statistics, layouts = [], [], []
    for weight in weights:
        if isinstance(weight, torch.Tensor):
            tensors.append(weight)
            layouts += [0] * LAYOUT_LENGTH
        elif isinstance(weight, Fp8Weight):
            tensors.append(weight.codes)
            statistics.append(weight.scales)
            layouts += _FP8_LAYOUT
        else:
            tensors.append(weight[0])
            statistics += weight.statistics
            layouts += weight.layout
    return tensors, statistics, layouts


def weights_of(
    tensors: Sequence[torch.Tensor], statistics: Sequence[torch.Tensor], layouts: Sequence[int]
) -> list[Weight]:
    """The weights that `flat_weights` made these arguments from."""
    weights: list[Weight] = []
    start = 0
    for index, tensor in enumerate(tensors):
        layout = layouts[LAYOUT_LENGTH * index : LAYOUT_LENGTH * (index + 1)]
        if not any(layout):
            weights.append(tensor)
            continue
        if list(layout) == _FP8_LAYOUT:
            weights.append(Fp8Weight(tensor, statistics[start]))
            start += 1
            continue
        of, count = (packed_of, NUM_STATISTICS[layout[0]]) if layout[0] < 0 else (NF4Weight.of, 5 if layout[-1] else 2)
        weights.append(of(tensor, statistics[start : start + count], layout))
        start += count
    return weights


def keep_packed(ctx: Any, weights: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """The weights to be saved, with None for codes, which `ctx` keeps.

    Codes are part of the model: saved for backward, those that are no parameters would be offloaded as activations are.
    """
    ctx.packed = [None if weight.is_floating_point() else weight for weight in weights]
    return [weight if weight.is_floating_point() else None for weight in weights]


def with_packed(ctx: Any, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All weights, of those that were saved."""
    return [weight if packed is None else packed for weight, packed in zip(weights, ctx.packed)]


class Adapter(NamedTuple):
    """One adapter of one of the layers; `columns` are its own of z."""

    a: torch.Tensor
    b: torch.Tensor
    layer: int
    scaling: float
    mask: torch.Tensor | None
    columns: slice


def adapters_of(
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    scalings: Sequence[float],
    layers: Sequence[int] | None = None,
) -> list[Adapter]:
    """The adapters out of an operator's flat arguments; None for `layers` if there is one layer."""
    start, adapters = 0, []
    for index, (a, b, mask, scaling) in enumerate(zip(lora_a, lora_b, masks, scalings)):
        columns, start = slice(start, start + a.shape[0]), start + a.shape[0]
        rows = mask.reshape(-1, a.shape[1]) if mask.numel() else None
        adapters.append(Adapter(a, b, 0 if layers is None else layers[index], scaling, rows, columns))
    return adapters


def or_empty(tensors: Iterable[torch.Tensor | None], like: torch.Tensor) -> list[torch.Tensor]:
    """`tensors`, with one without elements for each None: an operator's list cannot hold None beside a gradient."""
    empty = like.new_empty(0, 0)
    return [empty if tensor is None else tensor for tensor in tensors]


def or_none(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """What `or_empty` was given, to be saved: hooks of saved tensors take as long for one without elements."""
    return [None if tensor.shape == (0, 0) else tensor for tensor in tensors]


def lists_of(tensors: Sequence[torch.Tensor], lengths: Sequence[int]) -> list[list[torch.Tensor]]:
    """Lists of these lengths out of `tensors`, in which they follow each other."""
    remaining = iter(tensors)
    return [[next(remaining) for _ in range(length)] for length in lengths]


def split_rows(
    stacked: torch.Tensor, lora_a: Sequence[torch.Tensor], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """The gradient of each A, in its dtype, out of those of all A below each other; None where it is not needed."""
    parts = stacked.split([a.shape[0] for a in lora_a])
    return [part.to(a.dtype) if need else None for part, a, need in zip(parts, lora_a, needed)]


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """(tokens, features)."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


# ---------------------------------------------------------------------------------------------------------------------
# Products
# ---------------------------------------------------------------------------------------------------------------------


@operator("liger_trainer::packed_matmul_", mutates=("out",))
def _packed_matmul_(
    out: torch.Tensor,
    rows: torch.Tensor,
    packed: torch.Tensor,
    statistics: Sequence[torch.Tensor],
    layout: Sequence[int],
    bias: torch.Tensor | None,
    transposed: bool,
    add: bool,
) -> None:
    """Writes to `out` the product of `rows` with the weight or its transpose, plus `bias`, or plus `out` with `add`."""
    if layout[0] < 0:
        base = decoded(packed_of(packed, statistics, layout), rows.dtype)
    else:
        base = dequantized(NF4Weight.of(packed, statistics, layout), rows.dtype)
    with base as dense:
        right = dense.T if transposed else dense
        if bias is not None:
            torch.addmm(bias, rows, right, out=out)
        else:
            torch.addmm(out, rows, right, beta=int(add), out=out)


def linear(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias`` in the dtype of `rows`."""
    bias = None if bias is None else bias.to(rows.dtype)
    if isinstance(weight, torch.Tensor):
        return F.linear(rows, weight.to(rows.dtype), bias)
    if isinstance(weight, Fp8Weight):
        return stored.product(rows, weight, bias)
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    _packed_matmul_(out, rows, weight[0], weight.statistics, weight.layout, bias, True, False)
    return out


def linears(rows: torch.Tensor, weights: Sequence[Weight], biases: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """`linear` of each weight; for those in fp8, `rows` are cast once. Only inside of an operator."""
    kinds = {weight.in_blocks for weight in weights if isinstance(weight, Fp8Weight)}
    casts = {in_blocks: stored.cast_for(rows, in_blocks) for in_blocks in kinds}
    return [
        stored.product_of_cast(casts[weight.in_blocks], rows, weight, bias)
        if isinstance(weight, Fp8Weight)
        else linear(rows, weight, bias)
        for weight, bias in zip(weights, biases)
    ]


def sum_of_products(rows: Sequence[torch.Tensor], weights: Sequence[Weight]) -> torch.Tensor:
    """The sum of ``rows[i] @ weights[i]``, accumulated by the matmuls, but for those in fp8, which cannot."""
    total: torch.Tensor | None = None
    for each, weight in zip(rows, weights):
        if isinstance(weight, Fp8Weight):
            one = stored.input_gradient(each, weight)
            total = one if total is None else total.add_(one)
            continue
        add = total is not None
        total = each.new_empty(each.shape[0], weight.shape[1]) if total is None else total
        if isinstance(weight, torch.Tensor):
            torch.addmm(total, each, weight.to(each.dtype), beta=int(add), out=total)
        else:
            _packed_matmul_(total, each, weight[0], weight.statistics, weight.layout, None, False, add)
    assert total is not None
    return total


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
    """The result y of one layer; `adapters` are those of this layer."""
    return add_adapters_(linear(x, weight, bias), z, adapters)


def add_adapters_(y: torch.Tensor, z: torch.Tensor, adapters: Iterable[Adapter]) -> torch.Tensor:
    """Adds the products of one layer's adapters to its result y."""
    for adapter in adapters:
        y.addmm_(z[:, adapter.columns], adapter.b.to(y.dtype).T, alpha=adapter.scaling)
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
    """The gradient dx, (tokens, in_features)."""
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
    """Two factors whose product is the adapters' part of dx; None with masks, or with more ranks than `max_rank`."""
    if _have_masks(adapters) or dz.shape[1] > max_rank:
        return None
    return dz, torch.cat([adapter.a for adapter in adapters])


def product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, scaling: float = 1.0) -> torch.Tensor:
    """``scaling * left.T @ right`` for a parameter of `dtype`; in fp32 where that is wider than the operands."""
    result = left.new_empty(left.shape[1], right.shape[1], dtype=torch.promote_types(dtype, left.dtype))
    if result.dtype == left.dtype:  # scaled before it is rounded
        torch.addmm(result, left.T, right, beta=0, alpha=scaling, out=result)
    else:
        matmul_into(result, left.T, right)
        if scaling != 1.0:
            result.mul_(scaling)
    return result.to(dtype)


def widest(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype that holds the numbers of all `tensors`."""
    return functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors])


def a_gradients(dz: torch.Tensor, x: torch.Tensor, adapters: Sequence[Adapter]) -> torch.Tensor:
    """The dA of all adapters below each other, (sum of the ranks, in_features), in the widest of their dtypes."""
    dtype = widest([adapter.a for adapter in adapters])
    if not _have_masks(adapters):
        return product(dz, x, dtype)
    return torch.cat([product(dz[:, each.columns], _dropped(x, each.mask), dtype) for each in adapters])


def b_gradient(dy: Sequence[torch.Tensor], z: torch.Tensor, adapter: Adapter) -> torch.Tensor:
    """The dB of one adapter, (out_features, rank)."""
    return product(dy[adapter.layer], z[:, adapter.columns], adapter.b.dtype, adapter.scaling)
