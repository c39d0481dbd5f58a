"""Products of rows with the weight of their expert where the experts' weights are packed (`kernels/lowbit/formats.py`).

The stack is decoded into the buffer that all packed weights share, and multiplied as any other. One of more than 1 GiB
comes in parts, each some experts and the rows of these; parts are multiplied by our own kernel, as torch's grouped
matmul begins with the first row. Which rows are an expert's only the device knows, so a part is told by its offsets.

The two layers of a block decode into different slots: a checkpointed block's backward finds the first layer's weight
where the recomputation left it.
"""

from __future__ import annotations

import torch

from liger_trainer.kernels.lowbit.buffers import LARGEST
from liger_trainer.kernels.lowbit.decode import decoded
from liger_trainer.kernels.lowbit.formats import PackedWeight
from liger_trainer.kernels.moe.grouped_matmul import grouped_rows, grouped_rows_
from liger_trainer.kernels.moe.sort_by_expert import ExpertRows


def experts_at_a_time(weight: PackedWeight, dtype: torch.dtype) -> int:
    """How many experts of a stack are decoded together, at least one."""
    _, rows, columns = weight.shape
    return max(1, LARGEST // max(1, rows * columns * dtype.itemsize))


def packed_rows(
    x: torch.Tensor,
    weight: PackedWeight,
    rows: ExpertRows,
    slot: int,
    *,
    top_k: int = 0,
    transposed: bool = False,
    bias: torch.Tensor | None = None,
    extra: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`grouped_rows` with the decoded weight.

    Args:
        x: See `grouped_rows`.
        weight: (E, N, K), or (E, K, N) if `transposed`; decoded in x's dtype.
        rows: See `grouped_rows`.
        slot: Number of the buffer.
        top_k: See `grouped_rows`.
        transposed: See `grouped_rows`.
        bias: See `grouped_rows`.
        extra: See `grouped_rows`.

    Returns:
        (R, N) in x's dtype.
    """
    experts, count = weight.shape[0], experts_at_a_time(weight, x.dtype)
    if count >= experts:
        with decoded(weight, x.dtype, slot) as dense:
            return grouped_rows(x, dense, rows, top_k=top_k, transposed=transposed, bias=bias, extra=extra)
    out = x.new_empty(rows.order.shape[0], weight.shape[2 if transposed else 1])
    for first in range(0, experts, count):
        part = slice(first, min(first + count, experts))
        of_part = ExpertRows(rows.order, rows.slots, rows.offsets[part.start : part.stop + 1])
        bias_of_part = None if bias is None else bias[part]
        extra_of_part = None if extra is None else (extra[0], extra[1][part])
        with decoded(weight.experts(part.start, part.stop), x.dtype, slot) as dense:
            grouped_rows_(out, x, dense, of_part, top_k, transposed, bias_of_part, extra_of_part)
    return out
