"""The rotation of queries whose last columns alone turn, as those of latent attention (MLA).

Its forward splits queries into the columns without a position and those with one, rotates the latter, and puts the two
together with ``torch.cat``: a pass over all queries each way, and another for the gradient of the split. Here the
rotary function returns a [`LastColumns`]. Put behind the columns that lay before them, whole queries are rotated in one
pass. Any other use of it rotates these columns alone.

The result is new memory: the projection's result may be held by others, such as a checkpoint that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import PLACE_IN_A_TENSOR
from liger_trainer.head.recorded import Pending

require(PLACE_IN_A_TENSOR)

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""``rotate(q, k, first=0)`` rotates q and k of 4 dimensions from column `first` on."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class LastColumns(Pending):
    """The rotated last columns of whole queries, not yet computed.

    Args:
        columns: The columns before their rotation, a view.
        whole: The queries that they are the last columns of, in the same layout.
        rotate: Rotates them.
        dim: The heads' dimension, 1 or 2.
    """

    def __init__(self, columns: torch.Tensor, whole: torch.Tensor, rotate: Rotate, dim: int) -> None:
        self.columns, self.whole, self.rotate, self.dim = columns, whole, rotate, dim
        self._result: torch.Tensor | None = None

    def build(self, for_write: bool = False) -> torch.Tensor:
        """The rotated columns, the same tensor at every call."""
        if self._result is None:
            self._result = self.rotate(self.columns, _no_heads(self.columns, self.dim))[0]
        return self._result

    def behind(self, front: Any) -> torch.Tensor | None:
        """``cat((front, self), -1)``; None unless `front` are the other columns of the whole queries."""
        first = self.whole.shape[-1] - self.columns.shape[-1]
        if self._result is not None or type(front) not in _PLAIN or front._base is not self.columns._base:
            return None
        if front.shape != (*self.whole.shape[:-1], first) or front.stride() != self.whole.stride():
            return None
        if front.storage_offset() != self.whole.storage_offset() or front.dtype != self.whole.dtype:
            return None
        if front.requires_grad != self.whole.requires_grad:
            return None
        return self.rotate(self.whole, _no_heads(self.whole, self.dim), first)[0]

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.cat and len(args) == 1 and kwargs in ({"dim": -1}, {"dim": 3}):
            parts = args[0]
            if len(parts) == 2 and isinstance(parts[1], cls) and (joined := parts[1].behind(parts[0])) is not None:
                return joined
        return super().__torch_function__(func, types, args, kwargs)


def rotate_last_columns(
    rotate: Rotate, q: torch.Tensor, k: torch.Tensor, dim: int, dtype: torch.dtype
) -> tuple[Any, torch.Tensor]:
    """``rotate(q, k)``, whose first result is a [`LastColumns`] where q are the last columns of whole queries.

    Args:
        rotate: The rotation.
        q: Queries, a view.
        k: Keys.
        dim: The heads' dimension of both, 1 or 2.
        dtype: The dtype of the tables, with which a result is promoted.
    """
    whole = None if torch.compiler.is_compiling() or dtype != q.dtype else _whole(q, dim)
    if whole is None:
        return rotate(q, k)
    return LastColumns(q, whole, rotate, dim), rotate(_no_heads(q, dim), k)[1]


def _no_heads(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.detach().narrow(dim, 0, 0)


def _whole(q: torch.Tensor, dim: int) -> torch.Tensor | None:
    """The queries, a contiguous (batch, seq, heads, size) in memory, that q are the last columns of; else None."""
    base = q._base
    if base is None or q.dim() != 4 or type(base) not in _PLAIN or base.dtype != q.dtype:
        return None
    batch, seq_len, heads, width = (q.transpose(1, 2) if dim == 1 else q).shape
    size = q.stride(dim)
    first = q.storage_offset() - base.storage_offset()
    if first <= 0 or first + width != size or base.numel() != batch * seq_len * heads * size:
        return None
    if not base.is_contiguous() or base.requires_grad != q.requires_grad:
        return None
    whole = base.view(batch, seq_len, heads, size)
    whole = whole.transpose(1, 2) if dim == 1 else whole
    return whole if whole.stride() == q.stride() else None
