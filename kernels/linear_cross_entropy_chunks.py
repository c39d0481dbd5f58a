"""The chunk loop of `linear_cross_entropy`: how many tokens a chunk holds, its matmuls, and how dW is summed."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels.cross_entropy_options import RowOptions, RowStats, check_labels_on_cpu, compute_dtype
from liger_trainer.kernels.cross_entropy_rows import row_gradient_, row_statistics_

_COLUMN_MULTIPLE = 64  # of the buffer's rows: matmuls lose their fast path on odd strides
_ROW_MULTIPLE = 128  # of a chunk: a matmul tile
_MAX_HALF_CHUNKS = 8  # dW sums of fp16 or bf16 chunks keep within the error of one big matmul up to here


class Needs(NamedTuple):
    """Which gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _chunk_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, weight_gradient: bool) -> int:
    """Tokens of a chunk: as many as `logits_memory` bytes hold, spread evenly over the chunks.

    The budget is exceeded in one case: where it would take a half-precision dW over `_MAX_HALF_CHUNKS` chunks, and so
    into an fp32 accumulator of V*H more elements' worth of memory, the buffer grows instead while that costs less.
    """
    tokens, hidden_size = hidden.shape
    rows = max(1, logits_memory // (_round_up(weight.shape[0], _COLUMN_MULTIPLE) * hidden.element_size()))
    if rows >= _ROW_MULTIPLE:
        rows -= rows % _ROW_MULTIPLE
    if weight_gradient and hidden.element_size() == 2:
        few = -(-tokens // _MAX_HALF_CHUNKS)
        few = _round_up(few, _ROW_MULTIPLE) if few >= _ROW_MULTIPLE else few
        if rows < few <= rows + hidden_size:
            rows = few
    chunks = -(-tokens // rows)
    even = -(-tokens // max(chunks, 1))
    return max(1, min(rows, _round_up(even, _ROW_MULTIPLE)))


def _accumulation_dtype(chunks: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which dW is summed over `chunks` chunks.

    A half-precision sum of c chunks rounds c times, and its error is that of one matmul's single rounding times
    sqrt((c + 1) / 2), added in quadrature to what the rounding of the logits has already cost: at the shapes of
    `docs/performance.md` 1.2 to 1.4 times eager's error of dW, for 4 to 8 chunks. Beyond 8 the sum is fp32.
    """
    return torch.float32 if chunks > _MAX_HALF_CHUNKS and dtype.itemsize == 2 else dtype


def _accumulate_(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    """``total = left @ right`` for the first chunk, ``total += left @ right`` for the others; `total` may be fp32."""
    if total.dtype == left.dtype:
        if first:
            torch.mm(left, right, out=total)
        else:
            torch.addmm(total, left, right, out=total)
    elif total.device.type == "cuda" and torch.version.hip is None:
        if first:
            torch.mm(left, right, out_dtype=total.dtype, out=total)
        else:
            torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        # No matmul sums half precision into fp32 here. On the CPU the operands are widened; elsewhere the product is
        # rounded to half precision once a chunk, but the sum is not.
        if total.device.type == "cpu":
            left, right = left.to(total.dtype), right.to(total.dtype)
        product = torch.mm(left, right)
        if first:
            total.copy_(product)
        else:
            total.add_(product)


def run_chunks(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weights: torch.Tensor | None,
    options: RowOptions,
    logits_memory: int,
    stats: RowStats,
    coefficient: torch.Tensor | None,
    needs: Needs,
    recompute: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fills `stats`, or with `recompute` reads them, and returns dX, dW and dbias, empty where not needed."""
    tokens, vocab_size = hidden.shape[0], weight.shape[0]
    check_labels_on_cpu(target, vocab_size, options.ignore_index)
    d_hidden, d_weight, d_bias = allocate_gradients(hidden, weight, bias, needs)
    if tokens == 0:
        return d_hidden, d_weight.zero_(), d_bias.zero_()
    rows = _chunk_rows(hidden, weight, logits_memory, needs.weight)
    width = _round_up(vocab_size, _COLUMN_MULTIPLE)
    buffer = hidden.new_empty(rows, width)
    total_dtype = _accumulation_dtype(-(-tokens // rows), weight.dtype)
    total = d_weight if total_dtype == weight.dtype else torch.empty_like(d_weight, dtype=total_dtype)
    bias_total = d_bias.new_zeros(d_bias.shape, dtype=compute_dtype(hidden))
    for start in range(0, tokens, rows):
        stop = min(start + rows, tokens)
        part, labels, part_stats = hidden[start:stop], target[start:stop], stats.rows(start, stop)
        logits = torch.mm(part, weight.t(), out=buffer[: stop - start, :vocab_size])
        upstream = coefficient[start:stop] if coefficient is not None and coefficient.dim() else coefficient
        if recompute:
            assert upstream is not None
            row_gradient_(logits, labels, part_stats, options, upstream, bias, class_weights, width=width)
        else:
            row_statistics_(logits, labels, part_stats, options, bias, class_weights, upstream, width)
        if needs.hidden:
            torch.mm(logits, weight, out=d_hidden[start:stop])
        if needs.weight:
            _accumulate_(total, logits.t(), part, first=start == 0)
        if needs.bias:
            bias_total += logits.sum(0, dtype=bias_total.dtype)
        del logits
    del buffer  # before the rounded copy of an fp32 dW is made
    return d_hidden, d_weight if total is d_weight else d_weight.copy_(total), d_bias.copy_(bias_total)


def allocate_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: Needs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised dX, dW and dbias with the strides autograd wants to adopt them; empty where not needed."""
    return (
        torch.empty_like(hidden) if needs.hidden else hidden.new_empty(0),
        torch.empty_like(weight) if needs.weight else weight.new_empty(0),
        torch.empty_like(bias) if needs.bias and bias is not None else weight.new_empty(0),
    )
