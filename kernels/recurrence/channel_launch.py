"""The launches of the kernels for decays by channel.

Shapes: T tokens; C chunks of 64 tokens; HEADS value heads; K rows and V columns of a state.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import CHUNK, Documents
from liger_trainer.kernels.recurrence.channel_factors import channel_factors_kernel, channel_totals_kernel
from liger_trainer.kernels.recurrence.channel_gradients import channel_gradients_kernel
from liger_trainer.kernels.recurrence.launch import (
    Channels,
    Gradients,
    Inputs,
    Tile,
    constants,
    fp32_products,
    padded,
)
from liger_trainer.kernels.rows import device_limits
from liger_trainer.kernels.runtime import INTERPRETED, cdiv


def _level_products(inputs: Inputs) -> str:
    """How the products of a level are multiplied: their operands are not in the dtype of the arguments, but decayed."""
    return "tf32" if inputs.v.dtype != torch.float32 and torch.version.hip is None else fp32_products()


def _tile(kernel: str, inputs: Inputs) -> Tile:
    """Columns, warps and stages of a kernel: ``"factors"`` or ``"gradients"``."""
    if INTERPRETED:
        return Tile(16, 4, 1)
    if device_limits(inputs.v.device).as_large_as_hopper:  # compared with float64 on an H200, not tuned
        return Tile(128, 8, 1) if kernel == "factors" else Tile(64, 8, 1)
    return Tile(32, 4 if kernel == "factors" else 8, 1)


def channel_totals(inputs: Inputs, documents: Documents) -> torch.Tensor:
    """The sums of g from the beginning of each chunk, fp32 (T, HEADS, K)."""
    assert documents.chunks is not None
    assert inputs.g is not None
    totals = inputs.g.new_empty(inputs.g.shape, dtype=torch.float32)
    heads, rows = inputs.g.shape[1:]
    block_k = min(64, padded(rows))
    channel_totals_kernel[(len(documents.chunks) * heads * cdiv(rows, block_k),)](
        inputs.g,
        documents.chunks,
        totals,
        *inputs.strides("g"),
        HEADS=heads,
        K=rows,
        BLOCK_K=block_k,
        num_warps=4,
    )
    return totals


def channel_factors(
    inputs: Inputs, documents: Documents, totals: torch.Tensor, solve: torch.Tensor | None = None
) -> Inputs:
    """What the scans take.

    Args:
        inputs: The arguments, g (T, HEADS, K).
        documents: With tables.
        totals: The result of `channel_totals`.
        solve: fp32 (C, HEADS, 64, 64): gets diag(beta) M; None if nobody needs it.
    """
    assert documents.chunks is not None
    tokens, heads, _ = inputs.v.shape
    chunks, rows = len(documents.chunks), inputs.k.shape[2]
    from_start_q, from_start_k, to_end_k = (inputs.k.new_empty(tokens, heads, rows) for _ in range(3))
    decay = inputs.v.new_empty(chunks, heads, rows, dtype=torch.float32)
    products = inputs.empty(chunks, CHUNK, CHUNK)
    tile = _tile("factors", inputs)
    channel_factors_kernel[(chunks * heads,)](
        inputs.q,
        inputs.k,
        totals,
        inputs.beta,
        documents.chunks,
        from_start_q,
        from_start_k,
        to_end_k,
        decay,
        products,
        solve,
        *inputs.strides("q", "k", "beta"),
        BLOCK_K=min(tile.columns, padded(rows)),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **{**constants(inputs), "PRECISION": _level_products(inputs)},
    )
    return inputs._replace(q=from_start_q, k=from_start_k, g=None, channels=Channels(to_end_k, decay, products))


def channel_gradients(
    inputs: Inputs,
    totals: torch.Tensor,
    do: torch.Tensor,
    states: torch.Tensor,
    dstates: torch.Tensor,
    u: torch.Tensor,
    y: torch.Tensor,
    documents: Documents,
    out: Gradients,
) -> None:
    """Writes the gradients of the arguments."""
    assert documents.chunks is not None
    heads, share = inputs.v.shape[1], inputs.v.shape[1] // inputs.k.shape[1]
    dq, dk = out.q, out.k
    if share > 1:
        make = dq.new_zeros if documents.padding else dq.new_empty
        dq, dk = (make(dq.shape[0] * dq.shape[1], heads, dq.shape[3], dtype=torch.float32) for _ in range(2))
    tile = _tile("gradients", inputs)
    block_k = min(tile.columns, padded(inputs.k.shape[2]))
    parts = cdiv(inputs.k.shape[2], block_k)
    make = inputs.v.new_zeros if documents.padding else inputs.v.new_empty
    dbeta = make(parts, *inputs.v.shape[:2], dtype=torch.float32) if out.beta is not None else None
    channel_gradients_kernel[(len(documents.chunks) * heads * parts,)](
        inputs.q,
        inputs.k,
        inputs.v,
        totals,
        inputs.beta,
        do,
        states,
        dstates,
        u,
        y,
        documents.chunks,
        dq,
        dk,
        out.v,
        out.g,
        dbeta,
        inputs.scale,
        inputs.v.shape[0] * heads,
        *inputs.strides("q", "k", "v", "beta"),
        *do.stride()[:2],
        V=inputs.v.shape[2],
        BLOCK_K=block_k,
        BLOCK_V=min(tile.columns, padded(inputs.v.shape[2])),
        LEVEL_PRECISION=_level_products(inputs),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **constants(inputs),
    )
    if dbeta is not None and out.beta is not None:
        out.beta.copy_(dbeta.sum(0).view(out.beta.shape))
    if share > 1:
        out.q.copy_(dq.unflatten(1, (-1, share)).sum(2).view(out.q.shape))
        out.k.copy_(dk.unflatten(1, (-1, share)).sum(2).view(out.k.shape))
