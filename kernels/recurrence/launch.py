"""The launches of the recurrence's kernels: tiles, grids, and what is allocated.

Shapes: C chunks of 64 tokens, D documents; HEADS value heads; K rows and V columns of a state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.documents import CHUNK, Documents
from liger_trainer.kernels.recurrence.chunk_gradients import (
    gate_gradients_kernel,
    key_gradients_kernel,
    pair_gradients_kernel,
)
from liger_trainer.kernels.recurrence.chunk_inverse import chunk_inverse_kernel
from liger_trainer.kernels.recurrence.chunk_scan import chunk_scan_kernel, reverse_scan_kernel
from liger_trainer.kernels.rows import device_limits
from liger_trainer.kernels.runtime import INTERPRETED, cdiv, next_power_of_2

_HEADS_OF_PROGRAM = 16
"""Value heads that one program of the gradients adds up at most."""

_MOST_COLUMNS = 256
"""The most columns of a state that the kernels take."""

_KEY_BLOCK = 64
"""Rows of a state in a program of the gradients of queries and keys."""


class Channels(NamedTuple):
    """What `channel_factors.py` makes for the scans, beside q exp(G) and k exp(G).

    Attributes:
        to_end_k: k exp(G_N - G), (T, heads, K), in the dtype of the arguments.
        decay: exp(G_N), fp32 (C, heads, K).
        products: P, (C, heads, 64, 64), in the dtype of the arguments.
    """

    to_end_k: torch.Tensor
    decay: torch.Tensor
    products: torch.Tensor


class Inputs(NamedTuple):
    """The arguments of the recurrence as its kernels take them, of all T tokens.

    Attributes:
        q: (T, key_heads, K).
        k: (T, key_heads, K), in the dtype of `q`.
        v: (T, heads, V), in the dtype of `q`.
        g: (T, heads), any floating dtype, or (T, heads, K); None with `channels`.
        beta: (T, heads), any floating dtype; None for 1.
        skip: (heads,), any floating dtype; None for 0.
        scale: Factor of the result.
        delta: Whether it is the delta rule.
        channels: The inputs of scans for decays by channel: `q` and `k` are q exp(G) and k exp(G), (T, heads, K).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    skip: torch.Tensor | None
    scale: float
    delta: bool
    channels: Channels | None = None

    def strides(self, *names: str) -> list[int]:
        """The strides of tokens and heads of these arguments."""
        strides: list[int] = []
        for name in names:
            tensor = getattr(self, name)
            strides += (0, 0) if tensor is None else tensor.stride()[:2]
        return strides

    def empty(self, chunks: int, rows: int, columns: int) -> torch.Tensor:
        """A matrix for each chunk and value head, in the dtype of the arguments."""
        return self.v.new_empty(chunks, self.v.shape[1], rows, columns)


class Tile(NamedTuple):
    """A launch configuration of one of the kernels."""

    columns: int
    warps: int
    stages: int


# Keyed by the rows of a state, padded; the columns of a program are at most those of the state.
_TILES = {
    "scan": {128: Tile(64, 4, 2), 256: Tile(32, 4, 2)},
    "states": {128: Tile(64, 4, 3), 256: Tile(32, 4, 2)},
    "reverse scan": {128: Tile(64, 4, 2), 256: Tile(32, 4, 2)},
    "pair gradients": {128: Tile(64, 4, 2), 256: Tile(64, 8, 2)},
    "key gradients": {256: Tile(64, 4, 2)},
    "key gradients of the delta rule": {256: Tile(32, 4, 3)},
}
"""Tiles of half precision on Hopper and on B200, measured on an H200 with 128 rows. There, with Triton 3.6, scans of 32
columns whose loops have one stage read memory out of bounds, see [`takes`]."""

_SMALL_TILES = {
    "scan": {64: Tile(32, 4, 2), 128: Tile(32, 4, 1), 256: Tile(16, 4, 1)},
    "states": {64: Tile(32, 4, 2), 128: Tile(32, 4, 1), 256: Tile(16, 4, 1)},
    "reverse scan": {64: Tile(32, 4, 2), 128: Tile(32, 4, 1), 256: Tile(16, 4, 1)},
    "pair gradients": {64: Tile(32, 8, 2), 128: Tile(32, 8, 2), 256: Tile(16, 8, 1)},
    "key gradients": {256: Tile(32, 4, 2)},
    "key gradients of the delta rule": {256: Tile(32, 4, 2)},
}
"""The same for other devices: NVIDIA's from Ampere on, whose programs have 99 KiB or more, and AMD's; not measured."""

_FP32_TILES = {
    "scan": Tile(16, 4, 1),
    "states": Tile(16, 4, 1),
    "reverse scan": Tile(16, 4, 1),
    "pair gradients": Tile(16, 8, 1),
    "key gradients": Tile(16, 4, 1),
    "key gradients of the delta rule": Tile(16, 4, 1),
}
"""Tiles of fp32; chosen to fit, not measured."""


def takes(rows: int, columns: int, dtype: torch.dtype, device: torch.device, by_channel: bool) -> bool:
    """Whether there are kernels for states of so many rows and columns, and arguments of this dtype.

    Before Ampere, Triton multiplies without tensor cores. On an H200, code that Triton 3.6 makes of some products reads
    past the end of shared memory: in fp32 that of ``dot(u, do.T)`` in `pair_gradients_kernel`, as compute-sanitizer
    says. Rows of 16 numbers are 64 bytes there, as are those of 32 in half precision, which fail alike. In fp32, on
    B200 and with decays by channel, states of more than 128 rows do not fit in shared memory. Torch runs all of those.
    """
    limits = device_limits(device)
    fp32 = dtype == torch.float32
    if not INTERPRETED and (limits.before_ampere or (fp32 and limits.as_large_as_hopper)):
        return False
    return rows <= (128 if fp32 or by_channel or limits.tensor_memory else 256) and columns <= _MOST_COLUMNS


def tile_for(kernel: str, inputs: Inputs) -> Tile:
    """The tile of a kernel, a key of `_TILES`."""
    block_k, block_v = padded(inputs.k.shape[2]), padded(inputs.v.shape[2])
    if INTERPRETED:
        return Tile(min(block_v, 32), 4, 1)
    limits = device_limits(inputs.v.device)
    if inputs.v.dtype == torch.float32:
        tile = _FP32_TILES[kernel]
    else:
        half = _TILES if limits.as_large_as_hopper else _SMALL_TILES
        tile = next(tile for rows, tile in half[kernel].items() if block_k <= rows)
    return tile._replace(columns=min(tile.columns, max(block_v, 32)))  # 16 were not tried


def padded(width: int) -> int:
    """The rows or columns of a tile that holds `width` of them."""
    return max(16, next_power_of_2(width))


def constants(inputs: Inputs) -> dict[str, Any]:
    """What all kernels know when they are compiled."""
    value_heads, key_heads, rows = inputs.v.shape[1], inputs.k.shape[1], inputs.k.shape[2]
    return {"HEADS": value_heads, "SHARE": value_heads // key_heads, "K": rows, "PRECISION": fp32_products()}


def _channels(inputs: Inputs) -> tuple[torch.Tensor | None, ...]:
    return inputs.channels or (None, None, None)


def fp32_products() -> str:
    """How fp32 operands are multiplied: by three products of tf32, as exact as fp32, where tensor cores have those."""
    return "ieee" if torch.version.hip is not None else "tf32x3"


def chunk_inverse(inputs: Inputs, documents: Documents, out: torch.Tensor, solve: torch.Tensor | None = None) -> None:
    """Writes T of each chunk and value head, (C, HEADS, 64, 64), in the dtype of the arguments.

    `solve` is diag(beta) M of decays by channel, fp32 (C, HEADS, 64, 64).
    """
    assert documents.chunks is not None
    chunk_inverse_kernel[(out.shape[0] * out.shape[1],)](
        inputs.k,
        inputs.g,
        inputs.beta,
        solve,
        documents.chunks,
        out,
        *inputs.strides("k", "g", "beta"),
        BLOCK_K=min(32, padded(inputs.k.shape[2])),
        num_warps=1,
        num_stages=1,
        **constants(inputs),
    )


def _levels(documents: Documents) -> list[tuple[int, int]]:
    """The first document and the number of documents: those without a parent, then those with one."""
    assert documents.spans is not None
    roots = documents.roots
    levels = (0, roots), (roots, len(documents.spans) - roots)
    return [level for level in levels if level[1]]


def scan(
    inputs: Inputs,
    inverse: torch.Tensor | None,
    initial: torch.Tensor | None,
    documents: Documents,
    final: torch.Tensor,
    o: torch.Tensor | None = None,
    states: torch.Tensor | None = None,
    u: torch.Tensor | None = None,
) -> None:
    """Writes the results, or the states that chunks begin with, and U.

    Args:
        inputs: The arguments.
        inverse: T, for the delta rule.
        initial: (roots, HEADS, K, V), contiguous; None for zeros.
        documents: With tables.
        final: fp32 (D or roots, HEADS, K, V): gets the last states of all documents, or of those with children. It is
            empty where nobody needs them.
        o: (T, HEADS, V), contiguous.
        states: (C, HEADS, K, V).
        u: (C, HEADS, 64, V).
    """
    assert documents.spans is not None
    columns = inputs.v.shape[2]
    # With decays by channel, two programs fit on a multiprocessor of Hopper with two stages, and one with three.
    tile = tile_for("scan" if states is None or inputs.channels else "states", inputs)
    for first, count in _levels(documents):
        chunk_scan_kernel[(count * inputs.v.shape[1] * cdiv(columns, tile.columns),)](
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.g,
            inputs.beta,
            inputs.skip,
            *_channels(inputs),
            inverse,
            initial,
            documents.spans,
            o,
            states,
            u,
            final,
            len(final) == len(documents.spans),
            first,
            inputs.scale,
            *inputs.strides("q", "k", "v", "g", "beta"),
            V=columns,
            BLOCK_K=padded(inputs.k.shape[2]),
            BLOCK_V=tile.columns,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **constants(inputs),
        )


def reverse_scan(
    inputs: Inputs,
    inverse: torch.Tensor | None,
    do: torch.Tensor,
    dfinal: torch.Tensor | None,
    documents: Documents,
    dstates: torch.Tensor,
    y: torch.Tensor,
    dinitial: torch.Tensor,
    all_first: bool,
) -> None:
    """Writes the gradients of the states behind the chunks, and Y.

    Args:
        inputs: The arguments.
        inverse: T, for the delta rule.
        do: (T, HEADS, V).
        dfinal: Gradients of the last states, (D, HEADS, K, V), contiguous; None for zeros.
        documents: With tables.
        dstates: (C, HEADS, K, V).
        y: (C, HEADS, 64, V).
        dinitial: fp32 (D, HEADS, K, V): gets the gradients of the first states. It is empty where nobody needs them.
        all_first: Whether those of documents without a parent are needed too.
    """
    assert documents.spans is not None
    columns = inputs.v.shape[2]
    tile = tile_for("reverse scan", inputs)
    for first, count in reversed(_levels(documents)):
        reverse_scan_kernel[(count * inputs.v.shape[1] * cdiv(columns, tile.columns),)](
            inputs.q,
            inputs.k,
            inputs.g,
            inputs.beta,
            *_channels(inputs),
            inverse,
            do,
            dfinal,
            documents.spans,
            dstates,
            y,
            dinitial,
            all_first,
            first,
            inputs.scale,
            *inputs.strides("q", "k", "g", "beta"),
            *do.stride()[:2],
            V=columns,
            BLOCK_K=padded(inputs.k.shape[2]),
            BLOCK_V=tile.columns,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **constants(inputs),
        )


class Gradients(NamedTuple):
    """The gradients of the arguments, contiguous; None for one that is not needed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    skip: torch.Tensor | None


def heads_of_program(share: int) -> int:
    """How many of the value heads of a key head a program adds up: the largest divisor that is not too large."""
    return next(count for count in range(min(share, _HEADS_OF_PROGRAM), 0, -1) if share % count == 0)


def chunk_gradients(
    inputs: Inputs,
    do: torch.Tensor,
    states: torch.Tensor,
    dstates: torch.Tensor,
    u: torch.Tensor | None,
    y: torch.Tensor,
    documents: Documents,
    out: Gradients,
) -> None:
    """Writes the gradients of the arguments; `out.skip` is fp32 (C, HEADS), the share of each chunk."""
    assert documents.chunks is not None
    key_heads, share = inputs.k.shape[1], inputs.v.shape[1] // inputs.k.shape[1]
    of_program = heads_of_program(share)
    parts = share // of_program
    dq, dk = out.q, out.k
    if parts > 1:
        make = dq.new_zeros if documents.padding else dq.new_empty
        dq, dk = (make(parts, *dq.shape, dtype=torch.float32) for _ in range(2))
    chunks, heads = len(documents.chunks), inputs.v.shape[1]
    key_gradients = "key gradients of the delta rule" if inputs.delta else "key gradients"
    pair_tile, key_tile = tile_for("pair gradients", inputs), tile_for(key_gradients, inputs)
    rows = inputs.k.shape[2]
    block_k = min(padded(rows), _KEY_BLOCK)
    blocks = cdiv(rows, block_k)
    # The terms of dG and dbeta: those of pairs, then those of each block of rows of the state.
    dtotal, dbeta = (inputs.v.new_empty(blocks + 1, chunks, heads, CHUNK, dtype=torch.float32) for _ in range(2))
    dlast = inputs.v.new_empty(blocks, chunks, heads, dtype=torch.float32)
    dp = inputs.v.new_empty(chunks * key_heads * parts, CHUNK, CHUNK)
    dm = torch.empty_like(dp) if inputs.delta else None
    common = {"OF_PROGRAM": of_program, "V": inputs.v.shape[2], "DELTA": inputs.delta, **constants(inputs)}
    pair_gradients_kernel[(len(dp),)](
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.g,
        inputs.beta,
        inputs.skip,
        do,
        u,
        y,
        documents.chunks,
        out.v,
        dp,
        dm,
        dtotal,
        dbeta,
        out.skip,
        inputs.scale,
        *inputs.strides("q", "k", "v", "g", "beta"),
        *do.stride()[:2],
        BLOCK_K=padded(rows),
        BLOCK_V=pair_tile.columns,
        num_warps=pair_tile.warps,
        num_stages=pair_tile.stages,
        **common,
    )
    key_gradients_kernel[(len(dp) * blocks,)](
        inputs.q,
        inputs.k,
        inputs.g,
        inputs.beta,
        do,
        inputs.v,
        states,
        dstates,
        u,
        y,
        dp,
        dm,
        documents.chunks,
        dq,
        dk,
        dtotal[1:],
        dbeta[1:],
        dlast,
        inputs.scale,
        out.q.numel(),
        dtotal[0].numel(),
        *inputs.strides("q", "k", "g", "beta"),
        *do.stride()[:2],
        *inputs.strides("v"),
        BLOCK_K=block_k,
        BLOCK_V=key_tile.columns,
        num_warps=key_tile.warps,
        num_stages=key_tile.stages,
        **common,
    )
    if out.g is not None or out.beta is not None:
        gate_gradients_kernel[(chunks * heads,)](
            dtotal,
            dbeta,
            dlast,
            documents.chunks,
            out.g,
            out.beta,
            dtotal[0].numel(),
            BLOCKS=blocks,
            HEADS=heads,
            DELTA=inputs.delta,
            num_warps=1,
        )
    if parts > 1:
        out.q.copy_(dq.sum(0))
        out.k.copy_(dk.sum(0))
