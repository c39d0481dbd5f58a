"""Chunks of tokens for the operators over an LM head: how many tokens a chunk holds, and memory for the gradients.

Shapes: N tokens, H hidden size, V vocabulary; a chunk is n of the N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from liger_trainer.kernels.head.loss_options import compute_dtype
from liger_trainer.kernels.head.weight_gradient import MAX_HALF_CHUNKS, WeightGradientSum, sums_in_block_floating_point
from liger_trainer.kernels.matmul import matmul_into
from liger_trainer.kernels.runtime import cdiv

COLUMN_MULTIPLE = 64  # the buffer's rows are padded to it: matmuls lose their fast path on odd strides
ROW_MULTIPLE = 128  # tokens of a matmul tile; a chunk holds whole tiles
MANY_ROWS = 896  # from here on a chunk fills whole waves of tiles, not only whole tiles
_WAVE = 2**22  # elements of a matmul's result that occupy every multiprocessor, as tiles of 128 by 256


class Needs(NamedTuple):
    """Which gradients are computed."""

    hidden_gradient: bool
    weight_gradient: bool
    bias_gradient: bool

    @classmethod
    def of(cls, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Needs:
        """The tensors that require one; none where gradients are disabled."""
        if not torch.is_grad_enabled():
            return cls(False, False, False)
        return cls(hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not less than `value`."""
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

    One class of one token takes `class_bytes`, by default one logit of the dtype of `hidden`. A chunk holds whole units
    of `unit` tokens; the result is 0 if not even one unit fits.

    A budget of many tokens may be exceeded by a sixth if that makes their number a multiple of 512, and is otherwise
    rounded down to a multiple of 256: then every wave of matmul tiles is full.

    It is exceeded further in one case. A half-precision dW of more than `MAX_HALF_CHUNKS` chunks needs an fp32
    accumulator of V*H elements; as long as a larger buffer costs less memory, the buffer grows instead. A dW that is
    summed as block floating point needs no such accumulator.
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
    """Uninitialised dX, dW and dbias, strided like their inputs so that autograd adopts them; empty if not needed."""
    return (
        torch.empty_like(hidden) if needs.hidden_gradient else hidden.new_empty(0),
        torch.empty_like(weight) if needs.weight_gradient else weight.new_empty(0),
        torch.empty_like(bias) if needs.bias_gradient and bias is not None else weight.new_empty(0),
    )


def saturating_chunk_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, weight_gradient: bool) -> int:
    """As `chunk_rows`, but without a dW to sum no more tokens than fill the device once: more would gain nothing."""
    rows = chunk_rows(hidden, weight, logits_memory, weight_gradient)
    if weight_gradient:
        return rows
    return min(rows, max(1024, round_up(_WAVE // weight.shape[1], ROW_MULTIPLE)))


def retained_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, retain_memory: int | None) -> int:
    """How many of the last tokens retain their logits for the backward: one chunk, or what `retain_memory` holds."""
    if retain_memory is None:
        rows = chunk_rows(hidden, weight, logits_memory, weight_gradient=True)
    else:
        rows = retain_memory // (round_up(weight.shape[0], COLUMN_MULTIPLE) * hidden.element_size())
        rows -= rows % ROW_MULTIPLE if rows >= ROW_MULTIPLE else 0
    return min(hidden.shape[0], rows)


def logits_buffer(hidden: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """Uninitialised memory for the logits of `rows` tokens, each row padded."""
    return hidden.new_empty(rows, round_up(weight.shape[0], COLUMN_MULTIPLE))


def chunk_spans(start: int, stop: int, rows: int) -> Iterator[tuple[int, int]]:
    """The first token and the one after the last of every chunk of `rows` tokens from `start` to `stop`."""
    for first in range(start, stop, rows):
        yield first, min(first + rows, stop)


class HeadGradients:
    """dX, dW and dbias of a head, from the gradients of the logits of one chunk of tokens after the other.

    Args:
        hidden: X, (N, H).
        weight: W, (V, H).
        bias: (V,), or None.
        needs: Which of the three are computed.
        chunks: How many chunks there will be.
        vocab_size: Columns of the logits, the first of V; by default all.
    """

    def __init__(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        needs: Needs,
        chunks: int,
        vocab_size: int | None = None,
    ) -> None:
        self.results = d_hidden, d_weight, d_bias = allocate_gradients(hidden, weight, bias, needs)
        self.partial = vocab_size is not None and vocab_size < weight.shape[0]
        if self.partial:
            weight, d_weight, d_bias = weight[:vocab_size], d_weight[:vocab_size], d_bias[:vocab_size]
        self.hidden, self.weight, self.chunks = hidden, weight, chunks
        self.d_hidden = d_hidden if needs.hidden_gradient else None
        self.weight_sum = WeightGradientSum(d_weight, chunks) if needs.weight_gradient else None
        self.bias_sum = d_bias.new_zeros(d_bias.shape, dtype=compute_dtype(hidden)) if needs.bias_gradient else None

    def add(self, start: int, stop: int, gradient: torch.Tensor) -> None:
        """Adds a chunk: the `gradient` of the logits of tokens `start` to `stop`, (stop - start, V)."""
        if self.d_hidden is not None:
            matmul_into(self.d_hidden[start:stop], gradient, self.weight)
        if self.weight_sum is not None:
            self.weight_sum.add(gradient, self.hidden[start:stop])
        if self.bias_sum is not None:
            self.bias_sum += gradient.sum(0, dtype=self.bias_sum.dtype)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """dX, dW and dbias, rounded once and empty if not needed; 0 without a chunk, and for classes without logits."""
        d_hidden, d_weight, d_bias = self.results
        if self.weight_sum is not None:
            self.weight_sum.finish()
        if self.bias_sum is not None:
            d_bias[: len(self.bias_sum)].copy_(self.bias_sum)
        if self.partial or not self.chunks:
            d_weight[self.weight.shape[0] if self.chunks else 0 :].zero_()
            d_bias[self.weight.shape[0] :].zero_()
        return d_hidden, d_weight, d_bias
