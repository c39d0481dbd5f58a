"""What every operator over an LM head plans alike: how many tokens a chunk holds, and where its gradients go."""

from __future__ import annotations

from typing import NamedTuple

import torch

from liger_trainer.kernels._weight_gradient import MAX_HALF_CHUNKS, sums_in_block_floating_point

COLUMN_MULTIPLE = 64  # of the buffer's rows: matmuls lose their fast path on odd strides
ROW_MULTIPLE = 128  # of a chunk: a matmul tile


class Needs(NamedTuple):
    """Which gradients are computed."""

    hidden: bool
    weight: bool
    bias: bool


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def chunk_rows(hidden: torch.Tensor, weight: torch.Tensor, logits_memory: int, weight_gradient: bool) -> int:
    """Tokens of a chunk: as many as `logits_memory` bytes hold, spread evenly over the chunks.

    The budget is exceeded in one case: where it would take a half-precision dW over `MAX_HALF_CHUNKS` chunks, and so
    into an fp32 accumulator of V*H more elements' worth of memory, the buffer grows instead while that costs less. A dW
    that is summed as block floating point needs no such accumulator.
    """
    tokens, hidden_size = hidden.shape
    rows = max(1, logits_memory // (round_up(weight.shape[0], COLUMN_MULTIPLE) * hidden.element_size()))
    if rows >= ROW_MULTIPLE and 2 * (rows % ROW_MULTIPLE) < ROW_MULTIPLE:
        rows -= rows % ROW_MULTIPLE  # the last tile would be mostly empty
    if weight_gradient and hidden.element_size() == 2 and not sums_in_block_floating_point(weight):
        few = -(-tokens // MAX_HALF_CHUNKS)
        few = round_up(few, ROW_MULTIPLE) if few >= ROW_MULTIPLE else few
        if rows < few <= rows + hidden_size:
            rows = few
    chunks = -(-tokens // rows)
    even = -(-tokens // max(chunks, 1))
    whole_tiles = round_up(even, ROW_MULTIPLE)
    return max(1, whole_tiles if whole_tiles <= rows else even)


def allocate_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, needs: Needs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Uninitialised dX, dW and dbias with the strides autograd wants to adopt them; empty where not needed."""
    return (
        torch.empty_like(hidden) if needs.hidden else hidden.new_empty(0),
        torch.empty_like(weight) if needs.weight else weight.new_empty(0),
        torch.empty_like(bias) if needs.bias and bias is not None else weight.new_empty(0),
    )
