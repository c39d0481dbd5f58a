"""The launches of the kernels for decays by channel.

Shapes: T tokens; C chunks of 64 tokens; HEADS value heads; K rows and V columns of a state.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.documents import CHUNK, Documents
from liger_trainer.kernels.recurrence.channel_factors import channel_factors_kernel, channel_products_kernel
from liger_trainer.kernels.recurrence.channel_gradients import channel_gradients_kernel, channel_pairs_kernel
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


_TILES = {"products": Tile(32, 4, 1), "pairs": Tile(128, 8, 1), "gradients": Tile(64, 8, 1)}
"""Tiles of Hopper and B200: the fastest of a sweep on an H200 with 32 heads of 128 channels."""


def _tile(kernel: str, inputs: Inputs) -> Tile:
    """Columns, warps and stages of a kernel, a key of `_TILES`."""
    if INTERPRETED:
        return Tile(16, 4, 1)
    return _TILES[kernel] if device_limits(inputs.v.device).as_large_as_hopper else Tile(32, 8, 1)


def channel_factors(
    inputs: Inputs, documents: Documents, solve: torch.Tensor | None = None
) -> tuple[Inputs, torch.Tensor]:
    """What the scans take, and the sums of g from the beginning of each chunk, fp32 (T, HEADS, K).

    Args:
        inputs: The arguments, g (T, HEADS, K).
        documents: With tables.
        solve: fp32 (C, HEADS, 64, 64): gets diag(beta) M; None if nobody needs it.
    """
    assert documents.chunks is not None
    assert inputs.g is not None
    tokens, heads, rows = inputs.g.shape
    chunks = len(documents.chunks)
    from_start_q, from_start_k, to_end_k = (inputs.k.new_empty(tokens, heads, rows) for _ in range(3))
    totals = inputs.g.new_empty(inputs.g.shape, dtype=torch.float32)
    decay = totals.new_empty(chunks, heads, rows)
    products = inputs.empty(chunks, CHUNK, CHUNK)
    block_k = min(32, padded(rows))
    channel_factors_kernel[(chunks * heads * cdiv(rows, block_k),)](
        inputs.q,
        inputs.k,
        inputs.g,
        documents.chunks,
        totals,
        from_start_q,
        from_start_k,
        to_end_k,
        decay,
        *inputs.strides("q", "k", "g"),
        HEADS=heads,
        SHARE=heads // inputs.k.shape[1],
        K=rows,
        BLOCK_K=block_k,
        num_warps=4,
    )
    tile = _tile("products", inputs)
    channel_products_kernel[(chunks * heads,)](
        inputs.q,
        inputs.k,
        totals,
        inputs.beta,
        documents.chunks,
        products,
        solve,
        *inputs.strides("q", "k", "beta"),
        BLOCK_K=min(tile.columns, padded(rows)),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **{**constants(inputs), "PRECISION": _level_products(inputs)},
    )
    of_scan = inputs._replace(q=from_start_q, k=from_start_k, g=None, channels=Channels(to_end_k, decay, products))
    return of_scan, totals


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
    chunks, rows, columns = len(documents.chunks), inputs.k.shape[2], inputs.v.shape[2]
    dq, dk = out.q, out.k
    if share > 1:
        make = dq.new_zeros if documents.padding else dq.new_empty
        dq, dk = (make(dq.shape[0] * dq.shape[1], heads, dq.shape[3], dtype=torch.float32) for _ in range(2))
    pair_tile, tile = _tile("pairs", inputs), _tile("gradients", inputs)
    block_k = min(tile.columns, padded(rows))
    parts = cdiv(rows, block_k)
    make = inputs.v.new_zeros if documents.padding else inputs.v.new_empty
    dbeta = make(parts + 1, *inputs.v.shape[:2], dtype=torch.float32) if out.beta is not None else None
    # Not in fp16, where dP may overflow.
    dtype = torch.bfloat16 if inputs.v.dtype == torch.bfloat16 else torch.float32
    dp, yu = (inputs.v.new_empty(chunks, heads, CHUNK, CHUNK, dtype=dtype) for _ in range(2))
    channel_pairs_kernel[(chunks * heads,)](
        inputs.v,
        inputs.beta,
        do,
        u,
        y,
        documents.chunks,
        out.v,
        dp,
        yu,
        dbeta,
        inputs.scale,
        *inputs.strides("v", "beta"),
        *do.stride()[:2],
        HEADS=heads,
        V=columns,
        BLOCK_V=min(pair_tile.columns, padded(columns)),
        PRECISION=fp32_products(),
        num_warps=pair_tile.warps,
        num_stages=pair_tile.stages,
    )
    channel_gradients_kernel[(chunks * heads * parts,)](
        inputs.q,
        inputs.k,
        totals,
        inputs.beta,
        do,
        states,
        dstates,
        u,
        y,
        dp,
        yu,
        documents.chunks,
        dq,
        dk,
        out.g,
        None if dbeta is None else dbeta[1:],
        inputs.scale,
        inputs.v.shape[0] * heads,
        *inputs.strides("q", "k", "beta"),
        *do.stride()[:2],
        V=columns,
        BLOCK_K=block_k,
        BLOCK_V=min(tile.columns, padded(columns)),
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
