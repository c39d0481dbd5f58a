"""Functions over the vocabulary that run on deferred logits one chunk of tokens at a time.

They are for logits without a gradient that take more than `logits_memory`, as in an evaluation. Argmax and argmin pass
no gradient on, and run so for the logits of a training step too. A reduction (argmax, top-k, a gather) returns its
result. A softmax and a slice of the vocabulary stay deferred, as one more step of the chain, until something reads
them. Smaller logits are built once, as ever, for all functions together.

The Trainer pads the logits of its processes to one length before it gives them to the user's functions. Padding the
hidden states does the same: one more column of theirs marks the tokens that are padding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.head.chunked_module import ModuleCall, chunked_rows
from liger_trainer.head.deferred_logits import RECORDERS, DeferredLogits
from liger_trainer.head.lm_head import RECORDABLE_DTYPES, HeadCall, Recorded, sharding_of, version_of
from liger_trainer.head.recorded import NOTHING_DONE, OfRows, RecordedChain


@dataclasses.dataclass(eq=False)
class _PaddedCall(ModuleCall):
    """The call `inner` and the steps of `chain`, for hidden states `(..., H + 1)`; `value` where the last is not 0."""

    inner: HeadCall | ModuleCall
    chain: RecordedChain
    value: float

    def gathered_product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        product = self.inner.gathered_product()

        def padded(hidden: torch.Tensor) -> torch.Tensor:
            return self.chain.replay(product(hidden[..., :-1])).masked_fill(hidden[..., -1:] != 0, self.value)

        return padded


def padded_logits(logits: DeferredLogits, length: int, value: float) -> DeferredLogits:
    """Deferred `logits` `(B, S, V)` without a graph as `(B, length, V)`, with `value` behind the S tokens."""
    recorded = logits.recorded
    recorded.check()
    call, (rows, tokens, vocab_size) = recorded.call, logits.meta.shape
    whole = _PaddedCall(
        *(call.head, vocab_size, logits.meta.dtype, None, call.logits_memory, call, recorded.chain, value)
    )
    marked = F.pad(recorded.hidden.detach(), (0, 1))
    marked = F.pad(marked, (0, 0, 0, length - tokens), value=1.0)
    meta = torch.empty(rows, length, vocab_size, dtype=logits.meta.dtype, device="meta")
    with torch.no_grad():
        return DeferredLogits.create(Recorded(whole, marked, NOTHING_DONE, version_of(marked)), meta)


T = torch.Tensor


def runs_in_chunks(x: DeferredLogits, passes_gradients: bool = True) -> bool:
    """Whether a function of `x`, which `passes_gradients` on or does not, should run on a chunk of tokens at a time.

    Not under autocast, which would give other dtypes inside the chunks; not on a sharded head, where every function
    would gather the weight; and not where the logits are built already, or need no more memory than a chunk.
    """
    call = x.recorded.call
    if (x.has_graph and passes_gradients) or torch.is_autocast_enabled(x.recorded.hidden.device.type):
        return False
    if not (call.fused or isinstance(call, ModuleCall)) or sharding_of(call.head):
        return False
    node: DeferredLogits | None = x
    while node is not None:
        if node.value is not None or node.value_no_grad is not None:
            return False
        node = node.parent
    tokens = x.meta.shape[:-1].numel()
    return tokens * call.vocab_size * x.meta.element_size() > call.logits_memory


def by_rows(x: DeferredLogits, function: Callable[..., Any], *others: torch.Tensor) -> Any:
    """``function(x, *others)``, a tensor or a tuple of tensors, of a `function` of rows that runs on chunks of them."""
    kinds: list[Any] = []

    def of_rows(rows: torch.Tensor, *more: torch.Tensor) -> Any:
        found = function(rows, *more)
        kinds.append(type(found))
        return found if isinstance(found, tuple) else (found,)

    columns = chunked_rows(x, of_rows, *others)
    return kinds[0](columns) if issubclass(kinds[0], tuple) else columns[0]


def columns_of(x: DeferredLogits, last: Any) -> Any:
    """``x[..., last]`` in chunks; `last` is a slice, which stays deferred, or a list or a tensor of ids."""
    if isinstance(last, slice):
        step = OfRows(lambda rows: rows[..., last])
        child = x.derive(step(x.meta), chain=x.recorded.chain.then(step))
        return x.add_view(child, step)
    return by_rows(x, lambda rows: rows[:, last])


def _records(recorder: Callable, *names: str) -> None:
    places = (T, torch, torch.special, F)
    RECORDERS.update({getattr(place, name): recorder for place in places for name in names if hasattr(place, name)})


def _is_last(x: DeferredLogits, dim: Any) -> bool:
    return isinstance(dim, int) and not isinstance(dim, bool) and dim in (-1, x.meta.dim() - 1)


def _reducing(name: str) -> Callable:
    function, passes_gradients = getattr(T, name), name not in ("argmax", "argmin")

    def recorder(x: DeferredLogits, dim: Any = None, keepdim: Any = False, **kwargs: Any) -> Any:
        dim = kwargs.pop("axis", dim)
        if kwargs or not isinstance(keepdim, bool) or not _is_last(x, dim) or not runs_in_chunks(x, passes_gradients):
            return NotImplemented
        with torch.set_grad_enabled(torch.is_grad_enabled() and passes_gradients):
            return by_rows(x, lambda rows: function(rows, -1, keepdim))

    return recorder


for _name in ("argmax", "argmin", "max", "min", "amax", "amin", "logsumexp"):
    _records(_reducing(_name), _name)


def _topk(x: DeferredLogits, k: int, dim: Any = -1, largest: bool = True, sorted: bool = True, **kwargs: Any) -> Any:
    if kwargs or not _is_last(x, dim) or not runs_in_chunks(x):
        return NotImplemented
    return by_rows(x, lambda rows: rows.topk(k, -1, largest, sorted))


def _gather(x: DeferredLogits, dim: Any, index: Any, **kwargs: Any) -> Any:
    if kwargs or not _is_last(x, dim) or not runs_in_chunks(x):
        return NotImplemented
    if not isinstance(index, T) or index.dim() != x.meta.dim() or index.shape[:-1] != x.meta.shape[:-1]:
        return NotImplemented
    return by_rows(x, lambda rows, ids: rows.gather(-1, ids), index)


def _take_along_dim(x: DeferredLogits, indices: Any, dim: Any = None, **kwargs: Any) -> Any:
    return _gather(x, dim, indices, **kwargs)


def _index_select(x: DeferredLogits, dim: Any, index: Any, **kwargs: Any) -> Any:
    if kwargs or not _is_last(x, dim) or not runs_in_chunks(x):
        return NotImplemented
    return by_rows(x, lambda rows: rows.index_select(-1, index))


_records(_topk, "topk")
_records(_gather, "gather")
_records(_take_along_dim, "take_along_dim")
_records(_index_select, "index_select")


def _softmax(name: str) -> Callable:
    function = getattr(torch, name)

    def recorder(x: DeferredLogits, dim: Any = None, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        kwargs.pop("_stacklevel", None)
        if args or kwargs or not _is_last(x, dim) or not runs_in_chunks(x):
            return NotImplemented
        step = OfRows(lambda rows: function(rows, -1, dtype=dtype))
        meta = step(x.meta)
        return x.derive(meta, chain=x.recorded.chain.then(step)) if meta.dtype in RECORDABLE_DTYPES else NotImplemented

    return recorder


for _name in ("softmax", "log_softmax"):
    _records(_softmax(_name), _name)
