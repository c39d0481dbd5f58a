"""What every operator over an LM head does alike: how many tokens a chunk holds, and the gradients of its chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_trainer.kernels.head.cross_entropy_options import compute_dtype
from liger_trainer.kernels.head.weight_gradient import MAX_HALF_CHUNKS, WeightGradientSum, sums_in_block_floating_point
from liger_trainer.kernels.runtime import cdiv

COLUMN_MULTIPLE = 64  # of the buffer's rows: matmuls lose their fast path on odd strides
ROW_MULTIPLE = 128  # of a chunk: a matmul tile
MANY_ROWS = 896  # from here on the tiles that run side by side count, not one tile


class Needs(NamedTuple):
    """Which gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def chunk_rows(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    logits_memory: int,
    weight_gradient: bool,
    unit: int = 1,
    class_bytes: int | None = None,
) -> int:
    """Tokens of a chunk: as many as `logits_memory` bytes hold, spread evenly over the chunks.

    A class of a token takes `class_bytes`, by default one logit of the dtype of `hidden`. Tokens that must not be
    parted come as units of `unit` tokens; then it is 0 where not even one unit fits.

    A budget of many tokens may be exceeded by a sixth where that makes their number a multiple of 512, and is otherwise
    rounded down to one of 256: the tiles of a matmul that run side by side are then all full.

    It is exceeded further in one case: where it would take a half-precision dW over `MAX_HALF_CHUNKS` chunks, and so
    into an fp32 accumulator of V*H more elements' worth of memory, the buffer grows instead while that costs less. A dW
    that is summed as block floating point needs no such accumulator.
    """
    tokens, hidden_size = hidden.shape
    class_bytes = class_bytes or hidden.element_size()
    rows = max(1, logits_memory // (round_up(weight.shape[0], COLUMN_MULTIPLE) * class_bytes))
    if rows >= MANY_ROWS and unit <= ROW_MULTIPLE:
        rows = round_up(rows, 512) if 6 * round_up(rows, 512) <= 7 * rows else rows // 256 * 256
    elif rows >= ROW_MULTIPLE and unit <= ROW_MULTIPLE and 2 * (rows % ROW_MULTIPLE) < ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE  # the last tile would be mostly empty
    if weight_gradient and hidden.element_size() == 2 and not sums_in_block_floating_point(weight):
        few = -(-tokens // MAX_HALF_CHUNKS)
        few = round_up(few, ROW_MULTIPLE) if few >= ROW_MULTIPLE else few
        if rows < few and class_bytes * (few - rows) <= 2 * hidden_size:
            rows = few
    units, most = tokens // unit, rows // unit
    if most == 0:
        return 0
    even = cdiv(units, max(cdiv(units, most), 1))
    whole_tiles = round_up(even, max(1, ROW_MULTIPLE // unit))
    return max(1, whole_tiles if whole_tiles <= most else even) * unit


def allocate_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: Needs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised dX, dW and dbias with the strides autograd wants to adopt them; empty where not needed."""
    return (
        torch.empty_like(hidden) if needs.hidden else hidden.new_empty(0),
        torch.empty_like(weight) if needs.weight else weight.new_empty(0),
        torch.empty_like(bias) if needs.bias and bias is not None else weight.new_empty(0),
    )


class FirstChunk(NamedTuple):
    """A first chunk of `tokens` tokens that is not computed like the others.

    `run` gets the buffer, the chunk's rows of dX, the sum of dW, and that of dbias, None for what is not needed.
    """

    tokens: int
    run: Callable[[torch.Tensor, torch.Tensor | None, WeightGradientSum | None, torch.Tensor | None], None]


def run_head_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: int,
    needs: Needs,
    step: Callable[[torch.Tensor, int, int], None],
    first: FirstChunk | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dX, dW and dbias, empty where not needed, from the logits of `rows` tokens at a time.

    ``step(logits, start, stop)`` gets the logits of tokens `start` to `stop`, without the bias and in rows that are
    padded (``logits.stride(0)`` columns are theirs), and where a gradient is needed writes it over them. The tokens of
    `first` come before all others, and `step` does not see them.
    """
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    d_hidden, d_weight, d_bias = allocate_gradients(hidden, weight, bias, needs)
    if tokens == 0:
        return d_hidden, d_weight.zero_(), d_bias.zero_()
    buffer = hidden.new_empty(rows, round_up(vocab_size, COLUMN_MULTIPLE))
    begin = 0 if first is None else first.tokens
    chunks = cdiv(tokens - begin, rows) + (first is not None)
    weight_sum = WeightGradientSum(d_weight, chunks) if needs.weight else None
    bias_total = d_bias.new_zeros(d_bias.shape, dtype=compute_dtype(hidden))
    if first is not None:
        first.run(buffer, d_hidden[:begin] if needs.hidden else None, weight_sum, bias_total if needs.bias else None)
    for start in range(begin, tokens, rows):
        stop = min(start + rows, tokens)
        part = hidden[start:stop]
        logits = torch.mm(part, weight.t(), out=buffer[: stop - start, :vocab_size])
        step(logits, start, stop)
        if needs.hidden:
            torch.mm(logits, weight, out=d_hidden[start:stop])
        if weight_sum is not None:
            weight_sum.add(logits, part)
        if needs.bias:
            bias_total += logits.sum(0, dtype=bias_total.dtype)
        del logits
    del buffer
    if weight_sum is not None:
        weight_sum.finish()
    return d_hidden, d_weight, d_bias.copy_(bias_total)
