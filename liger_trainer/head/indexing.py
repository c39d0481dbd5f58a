"""Which indexing of logits leaves their vocabulary whole, so that it is the same indexing of the hidden states."""

from __future__ import annotations

from typing import Any

import torch

from liger_trainer.head.deferred_logits import DeferredLogits


def _consumed(item: Any) -> int | None:
    """Dimensions an index takes; None for one that is not recorded."""
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, (bool, DeferredLogits)):
        return None
    if isinstance(item, (int, slice)):
        return 1
    if isinstance(item, torch.Tensor):
        if item.dtype == torch.bool:
            return item.dim() or None
        return 1 if item.dtype in (torch.int64, torch.int32) else None
    if isinstance(item, list) and item and all(isinstance(i, int) and not isinstance(i, bool) for i in item):
        return 1
    return None


def _is_full(item: slice, size: int) -> bool:
    whole = item.stop is None or (isinstance(item.stop, int) and item.stop >= size)
    return whole and item.start in (None, 0) and item.step in (None, 1)


def reaches_last(items: tuple, dims: int) -> bool:
    """Whether the last of `items` indexes the last of `dims` dimensions."""
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        return items[-1] is not Ellipsis
    return sum(_consumed(item) or 0 for item in items) == dims


def leaves_vocab_whole(items: tuple, dims: int, vocab_size: int) -> bool:
    """Whether `items` indexes leading dimensions only; a full slice of the last one is as good as none."""
    consumed = [_consumed(item) for item in items]
    if None in consumed or sum(1 for item in items if item is Ellipsis) > 1:
        return False
    if not reaches_last(items, dims):
        return sum(count or 0 for count in consumed) < dims
    last = items[-1]
    return isinstance(last, slice) and _is_full(last, vocab_size)
