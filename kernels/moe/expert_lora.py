"""What low-rank adapters (LoRA, arXiv 2106.09685) add to a linear layer of experts; W + s B A is never built.

With e the expert of row r, and of adapter j the factors A_j (E, rank, in) and B_j (E, out, rank)::

    z_r  = x_r @ A_e^T        y_r  = x_r @ W_e^T + z_r @ (s B_e)^T
    dz_r = dy_r @ s B_e       dx_r = dy_r @ W_e  + dz_r @ A_e
    dA_e = sum over the rows of e of dz_r^T x_r            dB_e = s * sum of dy_r^T z_r

The second terms are the thin product that `grouped_rows` adds in its own pass. All adapters of a layer are stacked into
one: their A below each other and their s B side by side, in the dtype of the rows, padded with zeros to a whole step of
the matrix units. Only the parameters are saved for backward: neither the stacked copies, which are large with a hundred
experts, nor z, which is one more thin product of tensors that are saved anyway.

Shapes: T tokens, k choices of each, R = T k rows sorted by expert, E experts; in and out features of a layer, rank of
its adapters together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from liger_trainer.kernels.moe.grouped_matmul import grouped_rows, grouped_weight_gradient
from liger_trainer.kernels.moe.sort_by_expert import ExpertRows

RANK_STEP = 16
"""The summed rank of a layer's adapters is rounded up to a multiple of it."""


class Stacked(NamedTuple):
    """The adapters of a layer, stacked into one.

    Args:
        a: (E, rank, in).
        b: s B, (E, out, rank).
    """

    a: torch.Tensor
    b: torch.Tensor


def stacked(
    lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor], scalings: Sequence[float], dtype: torch.dtype
) -> Stacked | None:
    """All adapters of a layer as one, in `dtype`; None without adapters."""
    if not lora_a:
        return None
    padding = padded_rank(lora_a) - sum(each.shape[1] for each in lora_a)
    a = torch.cat([each.to(dtype) for each in lora_a], 1)
    b = torch.cat([(each * scaling).to(dtype) for each, scaling in zip(lora_b, scalings)], 2)
    return Stacked(F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding)).contiguous())


def padded_rank(lora_a: Sequence[torch.Tensor]) -> int:
    """The rank of the stacked adapters."""
    rank = sum(each.shape[1] for each in lora_a)
    return rank + -rank % RANK_STEP


def forward_term(
    x: torch.Tensor, adapters: Stacked | None, rows: ExpertRows, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The pair z (R, rank) and s B, whose product is added to y; `x` and `top_k` are as in `grouped_rows`."""
    return None if adapters is None else (grouped_rows(x, adapters.a, rows, top_k=top_k), adapters.b)


def backward_term(
    dy: torch.Tensor, adapters: Stacked | None, rows: ExpertRows, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The pair dz (R, rank) and A (E, in, rank), whose product is added to dx."""
    if adapters is None:
        return None
    dz = grouped_rows(dy, adapters.b, rows, top_k=top_k, transposed=True)
    return dz, adapters.a.transpose(1, 2).contiguous()


def gradients(
    adapters: Stacked | None,
    term: tuple[torch.Tensor, torch.Tensor] | None,
    dy: torch.Tensor,
    x: torch.Tensor | None,
    rows: ExpertRows,
    dy_top_k: int,
    x_top_k: int,
    need_a: bool,
    need_b: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of A and of s B, stacked; one that is not needed has no elements.

    Args:
        adapters: The adapters; None where no gradient is needed.
        term: The result of `backward_term`, where the gradient of A is needed.
        dy: (R, out), or (T, out) with `dy_top_k`.
        x: (R, in), or (T, in) with `x_top_k`; None where no gradient is needed.
        rows: The R choices.
        dy_top_k: Choices per token, where dy has one row per token; otherwise 0.
        x_top_k: The same for x.
        need_a: Whether the gradient of A is needed.
        need_b: Whether the gradient of B is needed.
    """
    da, db = dy.new_empty(0), dy.new_empty(0)
    if need_a:
        assert term is not None
        assert x is not None
        da = grouped_weight_gradient(term[0], x, rows, right_top_k=x_top_k)
    if need_b:
        assert adapters is not None
        assert x is not None
        z = grouped_rows(x, adapters.a, rows, top_k=x_top_k)
        db = grouped_weight_gradient(dy, z, rows, left_top_k=dy_top_k)
    return da, db


def fake_gradients(
    dy: torch.Tensor, lora_a: Sequence[torch.Tensor], lora_b: Sequence[torch.Tensor], need_a: bool, need_b: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised tensors of the shapes that `gradients` returns, in the dtype of `dy`."""
    da, db = dy.new_empty(0), dy.new_empty(0)
    if need_a:
        da = dy.new_empty(lora_a[0].shape[0], padded_rank(lora_a), lora_a[0].shape[2])
    if need_b:
        db = dy.new_empty(*lora_b[0].shape[:2], padded_rank(lora_a))
    return da, db


def split(
    da: torch.Tensor,
    db: torch.Tensor,
    lora_a: Sequence[torch.Tensor],
    lora_b: Sequence[torch.Tensor],
    scalings: Sequence[float],
    need_a: Sequence[bool],
    need_b: Sequence[bool],
) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
    """The gradient of each A and each B, in its own dtype, cut out of the stacked ones."""
    each_da: list[torch.Tensor | None] = []
    each_db: list[torch.Tensor | None] = []
    start = 0
    for a, b, scaling, a_needed, b_needed in zip(lora_a, lora_b, scalings, need_a, need_b):
        columns = slice(start, start + a.shape[1])
        each_da.append(da[:, columns].to(a.dtype) if a_needed else None)
        each_db.append(db[:, :, columns].to(b.dtype) * scaling if b_needed else None)
        start = columns.stop
    return each_da, each_db


def saved(ctx: Any) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Every A, every B, and the other saved tensors, in the order in which they were saved."""
    count = len(ctx.scalings)
    tensors = ctx.saved_tensors  # read once: a checkpoint does not unpack a tensor again
    return tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
