"""The weight of a layer with adapters, floating or in 4 bits: its products, and its way through a schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch.nn import functional as F

from liger_trainer.kernels.lora.nf4 import LAYOUT_LENGTH, NF4Weight
from liger_trainer.kernels.lora.nf4_matmul import nf4_add_product_, nf4_linear

Weight: TypeAlias = torch.Tensor | NF4Weight


def flat_weights(weights: Sequence[Weight]) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """`weights` as an operator takes them: their memories, and statistics and layouts of those in 4 bits in a row."""
    memories, statistics, layouts = [], [], []
    for weight in weights:
        if isinstance(weight, torch.Tensor):
            memories.append(weight)
            layouts += [0] * LAYOUT_LENGTH
        else:
            memories.append(weight.packed)
            statistics += weight.statistics
            layouts += weight.layout
    return memories, statistics, layouts


def weights_of(
    memories: Sequence[torch.Tensor], statistics: Sequence[torch.Tensor], layouts: Sequence[int]
) -> list[Weight]:
    """The weights out of an operator's flat arguments."""
    weights: list[Weight] = []
    start = 0
    for index, memory in enumerate(memories):
        layout = layouts[LAYOUT_LENGTH * index : LAYOUT_LENGTH * (index + 1)]
        if not any(layout):
            weights.append(memory)
            continue
        end = start + (5 if layout[-1] else 2)
        weights.append(NF4Weight.of(memory, statistics[start:end], layout))
        start = end
    return weights


def linear(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """``rows @ weight.T + bias`` in the dtype of `rows`."""
    bias = None if bias is None else bias.to(rows.dtype)
    if isinstance(weight, torch.Tensor):
        return F.linear(rows, weight.to(rows.dtype), bias)
    return nf4_linear(rows, weight, bias)


def sum_of_products(rows: Sequence[torch.Tensor], weights: Sequence[Weight]) -> torch.Tensor:
    """The sum of ``rows[i] @ weights[i]``, made by the matmuls, which add to what is there."""
    total = rows[0].new_empty(rows[0].shape[0], weights[0].shape[1])
    for index, (each, weight) in enumerate(zip(rows, weights)):
        if isinstance(weight, torch.Tensor):
            torch.addmm(total, each, weight.to(each.dtype), beta=int(index > 0), out=total)
        else:
            nf4_add_product_(total, each, weight, index > 0)
    return total
