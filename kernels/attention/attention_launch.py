"""The launches of the attention kernels: tiles, grids, and what is allocated.

Shapes: T tokens and K keys of all documents, D head_dim; rows of q lie beside each other by head, (T, heads, D).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from liger_trainer.kernels.attention.attention_kernel import (
    delta_kernel,
    forward_kernel,
    key_gradients_kernel,
    query_gradients_kernel,
    selected_tiles_kernel,
)
from liger_trainer.kernels.head.logit_rows import transform_factors
from liger_trainer.kernels.rope.rope_kernel import contiguous_columns
from liger_trainer.kernels.rows import DeviceLimits, device_limits
from liger_trainer.kernels.runtime import INTERPRETED, cdiv, next_power_of_2, num_sms, on_device

MAX_HEAD_DIM = 512
_ANYWHERE = 256  # the columns of the widest heads that every device has tiles for


class Tile(NamedTuple):
    """A launch configuration of one of the kernels; `columns` of a head are summed by one program."""

    queries: int
    keys: int
    warps: int
    stages: int
    columns: int = 256


_TILES = {
    "forward": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 3), 256: Tile(128, 64, 8, 2), 512: Tile(128, 32, 8, 2)},
    "dk and dv": {64: Tile(64, 128, 8, 3), 128: Tile(32, 128, 8, 3)},
    "dk": {256: Tile(32, 128, 8, 2), 512: Tile(16, 64, 4, 2)},
    "dv": {256: Tile(32, 128, 8, 2), 512: Tile(32, 128, 8, 2)},
    "dq": {64: Tile(128, 64, 8, 3), 128: Tile(128, 64, 8, 2), 256: Tile(128, 32, 8, 2), 512: Tile(64, 16, 4, 2)},
}
"""Tiles of half precision for heads of up to so many columns, on Hopper and on B200.

Those of 512 columns are chosen by the compiled code, not measured. The registers hold no more than 64 rows of 512 sums,
and the eight warps of such a program would compute its scores twice, in narrow products. Two programs of 128 rows and
256 columns compute them twice as well, but in wide ones. dk and dq keep two tensors of their rows in shared memory, so
they have 64 rows, and the four warps of one product.
"""

_SMALL_TILES = {
    "forward": {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 2), 512: Tile(32, 32, 4, 2, 512)},
    "dk and dv": {64: Tile(32, 64, 4, 2), 128: Tile(32, 64, 8, 2)},
    "dk": {256: Tile(16, 64, 8, 2), 512: Tile(16, 32, 4, 2, 512)},
    "dv": {256: Tile(16, 64, 8, 2), 512: Tile(16, 32, 4, 2, 512)},
    "dq": {64: Tile(64, 32, 4, 2), 128: Tile(64, 32, 8, 2), 256: Tile(64, 16, 8, 2), 512: Tile(32, 16, 4, 2, 512)},
}
"""The same for other devices: NVIDIA's from Ampere on, whose programs have 99 KiB or more, and AMD's.

Devices with 64 KiB, as most of AMD's, take no heads of more than 256 columns.
"""

_A100_TILES = _SMALL_TILES | {
    "forward": _SMALL_TILES["forward"] | {512: Tile(64, 32, 8, 2, 512)},
    "dk": _SMALL_TILES["dk"] | {512: Tile(32, 32, 4, 2, 512)},
    "dv": _SMALL_TILES["dv"] | {512: Tile(32, 32, 4, 2, 512)},
    "dq": _SMALL_TILES["dq"] | {512: Tile(32, 32, 4, 2, 512)},
}
"""The same for programs that have 163 KiB; chosen to fit, not measured."""

_TURING_TILES = {
    "forward": {64: Tile(64, 32, 4, 1), 128: Tile(64, 32, 4, 1), 256: Tile(32, 16, 4, 1)},
    "dk and dv": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1)},
    "dk": {256: Tile(16, 16, 4, 1)},
    "dv": {256: Tile(16, 16, 4, 1)},
    "dq": {64: Tile(32, 32, 4, 1), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
}
"""The same for NVIDIA's devices before Ampere, whose programs have 64 KiB; chosen to fit, not measured."""

_FP32_TILES = {128: Tile(32, 32, 8, 1), 256: Tile(16, 16, 8, 1), 512: Tile(16, 16, 8, 1, 512)}
"""Tiles of fp32, whose products are made of single multiplications and keep their operands in registers.

The last one takes 128 KiB.
"""


def largest_head_dim(device: torch.device, dtype: torch.dtype) -> int:
    """The columns of the widest heads whose tiles fit a program of `device`: 512, or 256 where there is less memory.

    Those of 512 need 99 KiB in half precision (not Turing, nor AMD's with 64 KiB), and 163 KiB in fp32 (A100, Hopper,
    B200).
    """
    needed = 163 if dtype == torch.float32 else 99
    fits = INTERPRETED or device_limits(device).shared_memory >= needed * 1024
    return MAX_HEAD_DIM if fits else _ANYWHERE


def tile_for(kernel: str, q: torch.Tensor) -> Tile:
    """The tile of a kernel: ``"forward"``, ``"dk and dv"``, ``"dk"``, ``"dv"`` or ``"dq"``."""
    if INTERPRETED:
        return Tile(32, 16, 4, 1)
    tiles = _FP32_TILES if q.dtype == torch.float32 else _half_tiles(device_limits(q.device))[kernel]
    return next(tile for columns, tile in tiles.items() if q.shape[2] <= columns)


def _half_tiles(limits: DeviceLimits) -> dict[str, dict[int, Tile]]:
    if limits.before_ampere:
        return _TURING_TILES
    if limits.as_large_as_hopper:
        return _TILES
    return _A100_TILES if limits.shared_memory >= 163 * 1024 else _SMALL_TILES


def _parts(head_dim: int, tile: Tile) -> int:
    """How many programs sum the columns of one block of a head."""
    return cdiv(head_dim, tile.columns)


def _constants(q: torch.Tensor, k: torch.Tensor, tile: Tile, window: int, softcap: float) -> dict[str, Any]:
    """What the three kernels know when they are compiled."""
    head_dim = q.shape[2]
    return {
        "HEADS": q.shape[1],
        "GROUP": q.shape[1] // k.shape[1],
        "D": head_dim,
        "BLOCK_D": max(16, next_power_of_2(head_dim)),
        "COLUMNS": min(max(16, next_power_of_2(head_dim)), tile.columns),
        "QUERIES": tile.queries,
        "KEYS": tile.keys,
        "WINDOW": window > 0,
        "SOFTCAP": softcap > 0,
        "PRECISE": q.dtype == torch.float32,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


class Spans(NamedTuple):
    """Which keys the queries of each document see, and how scores become weights.

    Attributes:
        offsets: int32 (documents + 1,), on the device: document d is the tokens offsets[d] to offsets[d + 1] - 1, and
            may be empty; every token belongs to one. None for documents of `longest` tokens each.
        longest: At least the number of tokens of the longest document, at least 1.
        window: A query i sees the keys from i - window + 1 to i; 0 for all of its document up to i.
        scale: Factor of q . k.
        softcap: Bound of the scaled scores, softcap * tanh(score / softcap); 0 for none.
        key_offsets: int32 (documents + 1,), on the device: document d has the keys key_offsets[d] to
            key_offsets[d + 1] - 1, at least as many as queries, and its last query is at the position of its last key.
            They need `offsets`. None for the keys of its own tokens.
        longest_keys: At least the number of keys of the document with most; 0 for `longest`.
        bits: int32 (words, T), with a bit for each key of the longest document, or more: the query of token t sees the
            key at position 32 w + b of its document if also bit b of bits[w, t] is set. Each sees one or more. None for
            all keys.
    """

    offsets: torch.Tensor | None
    longest: int
    window: int
    scale: float
    softcap: float
    key_offsets: torch.Tensor | None = None
    longest_keys: int = 0
    bits: torch.Tensor | None = None

    def of(self, tokens: int) -> tuple[int, int, int]:
        """The number of documents of so many tokens, the most keys of one, and the window, 0 if none has more keys."""
        if self.offsets is None and tokens % self.longest:
            raise ValueError(
                f"`longest` is {self.longest}; without `offsets` it must divide the {tokens} tokens of `q`."
            )
        documents = tokens // self.longest if self.offsets is None else self.offsets.numel() - 1
        longest_keys = self.longest_keys or self.longest
        return documents, longest_keys, self.window if self.window < longest_keys else 0


def _selection(
    spans: Spans, q: torch.Tensor, k: torch.Tensor, tile: Tile, by_keys: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int | None]:
    """Arguments of a kernel: the bits, the list of tiles of each block of queries or of keys, T, and how many words.

    A document of n tokens from token s on has the lists s // size + document and so on, where `size` is that of blocks:
    as many as it has blocks, and no other's.
    """
    tokens = q.shape[0]
    if spans.bits is None:
        return None, None, tokens, None
    documents, longest_keys, window = spans.of(tokens)
    bits, words = spans.bits.contiguous(), spans.bits.shape[0]
    if by_keys:
        lists, blocks = k.shape[0] // tile.keys + documents, cdiv(longest_keys, tile.keys)
        most = cdiv(spans.longest, tile.queries)
    else:
        lists, blocks = tokens // tile.queries + documents, cdiv(spans.longest, tile.queries)
        most = cdiv(32 * words, tile.keys)
    tiles = bits.new_empty(lists, 1 + most)
    selected_tiles_kernel[(blocks * documents,)](
        bits,
        tiles,
        spans.offsets,
        spans.key_offsets,
        tokens,
        words,
        spans.longest,
        blocks,
        window,
        QUERIES=tile.queries,
        KEYS=tile.keys,
        TILES=16,
        WINDOW=window > 0,
        BY_KEYS=by_keys,
        num_warps=4,
    )
    return bits, tiles, tokens, words


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: Spans) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each document to itself, and to further keys before its own.

    Args:
        q: Queries, (T, q_heads, D), in float16, bfloat16 or float32, with D from 16 to
            `largest_head_dim`. Any strides; a copy is made if the last one is not 1.
        k: Keys, (K, k_heads, D), with K = T unless there are `key_offsets`; query head h reads key head
            h // (q_heads / k_heads), which must divide.
        v: Values, shaped as `k`.
        spans: The documents, and what their queries see.

    Returns:
        out (T, q_heads, D), contiguous and in the dtype of `q`, and lse (q_heads, T) in float32, the natural logarithm
        of the sum of the exponentials of the scaled and capped scores.

    Raises:
        ValueError: If `longest` does not divide T without `offsets`.
    """
    tokens, heads, head_dim = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((heads, tokens), dtype=torch.float32)
    if out.numel() == 0:
        return out, lse
    q, k, v = (contiguous_columns(x) for x in (q, k, v))
    documents, _, window = spans.of(tokens)
    tile = tile_for("forward", q)
    inner, outer, _ = transform_factors(spans.softcap or None, spans.scale, 1.0)
    blocks = cdiv(spans.longest, tile.queries)
    with on_device(q):
        forward_kernel[(blocks * _parts(head_dim, tile) * heads * documents,)](
            q,
            k,
            v,
            out,
            lse,
            spans.offsets,
            spans.key_offsets,
            *_selection(spans, q, k, tile),
            spans.longest,
            blocks,
            window,
            inner,
            outer,
            *q.stride()[:2],
            *k.stride()[:2],
            *v.stride()[:2],
            **_constants(q, k, tile, window, spans.softcap),
        )
    return out, lse


def row_dots(d_out: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The delta (heads, T), the dot products of the rows of `d_out` and `out`, both (T, heads, D), in float32."""
    tokens, heads, head_dim = out.shape
    delta = out.new_empty((heads, tokens), dtype=torch.float32)
    if out.numel() == 0:
        return delta
    d_out, out = contiguous_columns(d_out), contiguous_columns(out)
    block_d, rows = max(16, next_power_of_2(head_dim)), 32 if head_dim <= 256 else 16
    blocks = cdiv(tokens, rows)
    with on_device(out):
        delta_kernel[(blocks * heads,)](
            d_out,
            out,
            delta,
            tokens,
            blocks,
            *d_out.stride()[:2],
            *out.stride()[:2],
            D=head_dim,
            BLOCK_D=block_d,
            ROWS=rows,
            num_warps=4,
        )
    return delta


def _splits(programs: int, group: int, device: torch.device) -> int:
    """Over how many programs the heads that share keys are split: up to four, where some multiprocessors have none."""
    splits = 1
    while splits < 4 and group % (2 * splits) == 0 and programs * splits < num_sms(device):
        splits *= 2
    return splits


def _partial_sums(gradient: torch.Tensor | None, splits: int) -> torch.Tensor | None:
    """What each of the programs writes: `gradient` if there is one, else (splits, K, k_heads, D) in fp32."""
    if gradient is None or splits == 1:
        return gradient
    return gradient.new_empty((splits, *gradient.shape), dtype=torch.float32)


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    spans: Spans,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `forward`, or of one whose result was merged with that of further keys.

    Args:
        d_out: Gradient of `out`, (T, q_heads, D), in its dtype and with any strides.
        q: As for `forward`, like `k`, `v` and all that is not described here.
        k: Keys.
        v: Values.
        out: Result, (T, q_heads, D): that of `forward`, or merged.
        lse: Logarithm of the sum of exponentials, float32 (q_heads, T), contiguous: that of `forward`, or merged.
        spans: Documents.

    Returns:
        The gradients of q, k and v, contiguous and in their dtypes. The same bits in every run.

    Raises:
        ValueError: As `forward`.
    """
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    if dq.numel() == 0:
        return dq, dk, dv
    q, k, v, d_out = (contiguous_columns(x) for x in (q, k, v, d_out))
    delta, lse = row_dots(d_out, out), lse.contiguous()
    tokens, heads, head_dim = q.shape
    documents, longest_keys, window = spans.of(tokens)
    factors = transform_factors(spans.softcap or None, spans.scale, 1.0)
    strides = [stride for x in (q, k, v, d_out) for stride in x.stride()[:2]]
    with on_device(q):
        # The registers hold one sum of heads of more than 128 columns: one launch for each, both of which compute p.
        launches = (("dk", dk, None), ("dv", None, dv)) if head_dim > 128 else (("dk and dv", dk, dv),)
        for name, *gradients in launches:
            tile = tile_for(name, q)
            blocks = cdiv(longest_keys, tile.keys)
            programs = blocks * _parts(head_dim, tile) * k.shape[1] * documents
            splits = _splits(programs, heads // k.shape[1], q.device)
            sums = [_partial_sums(gradient, splits) for gradient in gradients]
            key_gradients_kernel[(programs * splits,)](
                q,
                k,
                v,
                d_out,
                lse,
                delta,
                *sums,
                spans.offsets,
                spans.key_offsets,
                *_selection(spans, q, k, tile, by_keys=True),
                k.shape[0],
                spans.longest,
                blocks,
                window,
                *factors,
                *strides,
                SPLITS=splits,
                **_constants(q, k, tile, window, spans.softcap),
            )
            for gradient, partial in zip(gradients, sums, strict=True):
                if gradient is not None and partial is not None and partial is not gradient:
                    gradient.copy_(partial.sum(0))
        tile = tile_for("dq", q)
        blocks = cdiv(spans.longest, tile.queries)
        query_gradients_kernel[(blocks * _parts(head_dim, tile) * heads * documents,)](
            q,
            k,
            v,
            d_out,
            lse,
            delta,
            dq,
            spans.offsets,
            spans.key_offsets,
            *_selection(spans, q, k, tile),
            spans.longest,
            blocks,
            window,
            *factors,
            *strides,
            **_constants(q, k, tile, window, spans.softcap),
        )
    return dq, dk, dv
