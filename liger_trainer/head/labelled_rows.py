"""The rows of hidden states that have a label, so that the head multiplies no others.

The operators of `kernels/head` multiply every row that they are given, since the number of labelled rows is on the
device, and reading it would stall the device. A trainer that has counted the labels on the host says so
(`Step.labelled`). Then K rows, that bound rounded up, are gathered before the operator, and what it returns for
each row is scattered into zeros, the values of a token without a label:

    index = the places of the labelled rows, and -1 as often as K exceeds their number
    rows  = hidden[index]               backward: d_hidden = 0, d_hidden[index] = d_rows

Rows for -1 have an ignored label. If there are more labelled rows than K, the first row becomes NaN, and so do the loss
and the gradients: no token is dropped silently. Nothing here waits for the device.

Bytes moved: 2*K*H*b forward, and (N + 2*K)*H*b backward.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from liger_trainer.kernels.autograd import one_number
from liger_trainer.kernels.runtime import saved_as_is


@dataclasses.dataclass(frozen=True, eq=False)
class LabelledRows:
    """K rows, the labelled ones first.

    Args:
        target: `(K,)`, their labels; ignored in the rows without one, which repeat the first row.
        logits_memory: Bytes that the operator may spend on a chunk of logits.
        index: `(K,)`, the places of the rows among all; -1 is replaced by the place of the first row.
        slots: `(K,)`, the same, but -1 is replaced by the number of all rows: a place after the last.
        shape: The shape of all labels.
        too_many: 0-d bool, whether there are more labelled rows than K.
    """

    target: torch.Tensor
    logits_memory: int
    index: torch.Tensor
    slots: torch.Tensor
    shape: torch.Size
    too_many: torch.Tensor

    def gathered(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(K, H)` of `hidden` `(..., H)`."""
        with saved_as_is():
            return _Gather.apply(hidden.reshape(-1, hidden.shape[-1]), self.index, self.slots, self.too_many)

    def scattered(self, values: torch.Tensor) -> torch.Tensor:
        """`values` `(K,)` in the shape of all labels, 0 where there is none."""
        with saved_as_is():
            return _Scatter.apply(values, self.index, self.slots, self.shape)


def rows_with_label(kept: int, target: torch.Tensor, ignore_index: int, logits_memory: int) -> LabelledRows:
    """`kept` rows of the labels `target` `(...)`, the labelled ones first; `logits_memory` is for the operator."""
    labels = target.reshape(-1)
    labelled = labels != ignore_index
    found = torch.nonzero_static(labelled, size=kept, fill_value=-1).view(-1)
    filling = found < 0
    index = torch.where(filling, found[:1].clamp(min=0), found)
    return LabelledRows(
        target=labels.index_select(0, index).masked_fill(filling, ignore_index),
        logits_memory=logits_memory,
        index=index,
        slots=torch.where(filling, labels.numel(), found),
        shape=target.shape,
        too_many=labelled.sum() > kept,
    )


class _Gather(torch.autograd.Function):
    """`hidden` `(N, H)` at `index` `(K,)`.

    The gradient is written, not added: only the last slot, which is dropped, occurs twice.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, index: torch.Tensor, slots: torch.Tensor, too_many: torch.Tensor
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.total = hidden.shape[0]
        ctx.save_for_backward(slots)
        rows = hidden.index_select(0, index)
        rows[:1].masked_fill_(too_many, math.nan)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        (slots,) = ctx.saved_tensors
        return None if grad is None else _placed(grad, slots, ctx.total), None, None, None


class _Scatter(torch.autograd.Function):
    """`values` `(K,)` at `slots` of zeros.

    An expanded gradient stays expanded, so that it is seen to be one number, and no gradient stays none.
    """

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, index: torch.Tensor, slots: torch.Tensor, shape: torch.Size
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index)
        return _placed(values, slots, shape.numel()).clone().view(shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if grad is None:
            return None, None, None, None
        (index,) = ctx.saved_tensors
        number = one_number(grad)
        taken = grad.reshape(-1).index_select(0, index) if number is None else number.expand(index.shape)
        return taken, None, None, None


def _placed(rows: torch.Tensor, slots: torch.Tensor, total: int) -> torch.Tensor:
    """Zeros `(total, ...)` with `rows` at `slots`; rows at the slot `total` are dropped."""
    return rows.new_zeros(total + 1, *rows.shape[1:]).index_copy_(0, slots, rows)[:total]
