"""The functions that leave `DeferredLogits` deferred, and how each is recorded.

A recorder takes the arguments of its function and returns the result, or NotImplemented if the function has to run on
built logits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from liger_trainer.head.deferred_logits import METADATA, RECORDERS, DeferredLogits, unwrapped
from liger_trainer.head.fused_loss import deferred_cross_entropy
from liger_trainer.head.lm_head import RECORDABLE_DTYPES
from liger_trainer.head.recorded import Cast, Scale, Tanh
from liger_trainer.head.vocab_functions import columns_of, runs_in_chunks
from liger_trainer.head.warn_once import warn_once

T = torch.Tensor


_GETTERS = (
    *("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "names", "itemsize", "nbytes"),
    *("is_cuda", "is_cpu", "is_xpu", "is_mps", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested"),
    *("_base", "_version", "output_nr", "retains_grad"),
)
_METADATA = (
    *(getattr(T, name).__get__ for name in _GETTERS if hasattr(T, name)),
    *(T.size, T.dim, T.ndimension, T.numel, T.nelement, T.stride, T.is_contiguous, T.element_size, T.get_device),
    *(T.is_floating_point, T.is_complex, T.is_signed, T.is_inference, T._is_view, T.__len__, T.__hash__),
    *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference),
)
METADATA.update((function, function) for function in _METADATA)
METADATA[T.__format__] = lambda x, *args: format(repr(x), *args)
# DistributedDataParallel sends every output that has a `grad_fn` through a Function, which would build the logits.
METADATA[T.grad_fn.__get__] = lambda *args: None  # type: ignore[union-attr]

RECORDERS[F.cross_entropy] = deferred_cross_entropy


def _records(*functions: Callable) -> Callable[[Callable], Callable]:
    def register(recorder: Callable) -> Callable:
        RECORDERS.update(dict.fromkeys(functions, recorder))
        return recorder

    return register


def _elementwise(x: DeferredLogits, step: Cast | Scale | Tanh) -> Any:
    meta = step(x.meta)
    if meta.dtype not in RECORDABLE_DTYPES:
        return NotImplemented
    return x.derive(meta, chain=x.recorded.chain.then(step))


def _elementwise_(x: DeferredLogits, step: Cast | Scale | Tanh) -> Any:
    if x.shares_memory:
        return NotImplemented
    x.recorded.chain = x.recorded.chain.then(step)
    x.value_no_grad = None
    return x


def _scale_of(x: DeferredLogits, factor: Any, divide: bool) -> Scale | None:
    if isinstance(factor, (bool, DeferredLogits)):
        return None
    if isinstance(factor, torch.Tensor):
        if factor.dim() or factor.device.type not in ("cpu", x.meta.device.type, x.recorded.hidden.device.type):
            return None
        if not factor.is_floating_point() and factor.dtype not in (torch.int64, torch.int32):
            return None
        if factor.requires_grad:
            return None
        return Scale(factor, divide)
    return Scale(factor, divide) if isinstance(factor, (int, float)) else None


def _scaling(divide: bool, record: Callable[[DeferredLogits, Scale], Any]) -> Callable:
    def recorder(x: DeferredLogits, other: Any, **kwargs: Any) -> Any:
        scale = None if kwargs else _scale_of(x, other, divide)
        return NotImplemented if scale is None else record(x, scale)

    return recorder


_records(T.mul, T.multiply, T.__mul__, T.__rmul__, torch.mul, torch.multiply)(_scaling(False, _elementwise))
_records(T.div, T.divide, T.true_divide, T.__truediv__, torch.div, torch.divide, torch.true_divide)(
    _scaling(True, _elementwise)
)
_records(T.mul_, T.multiply_, T.__imul__)(_scaling(False, _elementwise_))
_records(T.div_, T.divide_, T.true_divide_, T.__itruediv__)(_scaling(True, _elementwise_))


@_records(T.tanh, torch.tanh)
def _tanh(x: DeferredLogits, **kwargs: Any) -> Any:
    return NotImplemented if kwargs else _elementwise(x, Tanh())


@_records(T.tanh_, torch.tanh_)
def _tanh_(x: DeferredLogits) -> Any:
    return _elementwise_(x, Tanh())


def _cast(x: DeferredLogits, dtype: torch.dtype, copy: bool = False) -> Any:
    if dtype == x.meta.dtype and not copy:
        return x
    return _elementwise(x, Cast(dtype)) if dtype in RECORDABLE_DTYPES else NotImplemented


def _casting(dtype: torch.dtype) -> Callable:
    return lambda x, **kwargs: NotImplemented if kwargs else _cast(x, dtype)


_records(T.float)(_casting(torch.float32))
_records(T.bfloat16)(_casting(torch.bfloat16))
_records(T.half)(_casting(torch.float16))


@_records(T.type_as)
def _type_as(x: DeferredLogits, other: torch.Tensor) -> Any:
    return _to(x, other.device, other.dtype)


@_records(T.type)
def _type(x: DeferredLogits, dtype: Any = None, non_blocking: bool = False) -> Any:
    return _cast(x, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


@_records(T.to)
def _to(x: DeferredLogits, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
    args = tuple(torch.empty((), dtype=a.dtype, device=a.device) if isinstance(a, torch.Tensor) else a for a in args)
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return NotImplemented
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    here = x.recorded.hidden.device
    moves = device is not None and (device.type != here.type or device.index not in (None, here.index))
    if moves or memory_format is not None or any(isinstance(a, bool) for a in args[2:]):
        return NotImplemented
    return _cast(x, dtype or x.meta.dtype, copy)


@_records(T.clone, torch.clone)
def _clone(x: DeferredLogits, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    return x.derive(x.meta.clone())


@_records(T.contiguous)
def _contiguous(x: DeferredLogits, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    return x if x.meta.is_contiguous() else x.derive(x.meta.contiguous())


@_records(T.detach, torch.detach, T.data.__get__)  # type: ignore[attr-defined]
def _detach(x: DeferredLogits) -> DeferredLogits:
    return x.add_view(x.derive(x.meta, detached=True), torch.Tensor.detach)


# Of FSDP and DDP, and of Lightning Fabric, which comes in two packages.
_HOOKS_THAT_ONLY_LOOK = ("torch.distributed.", "lightning.fabric.", "lightning_fabric.")


@_records(T.register_hook)
def _register_hook(x: DeferredLogits, hook: Callable) -> Any:
    owner = getattr(hook, "func", hook)
    if not getattr(owner, "__module__", "").startswith(_HOOKS_THAT_ONLY_LOOK):
        # A hook gets the gradient of the logits and may change it, so from here on that gradient has to exist.
        x.tracked = False
        _warn_of_missing_gradient(x)
    elif x.recorded.hidden.requires_grad:
        # FSDP gathers the unit of the head, and maybe of the final norm, when the logits get a gradient, and Fabric
        # checks who started the backward. The logits get none.
        x.recorded.hidden.register_hook(lambda gradient: (hook(gradient), None)[1])
    with unwrapped():
        return x.register_hook(hook)


@_records(T.retain_grad)
def _retain_grad(x: DeferredLogits) -> Any:
    _warn_of_missing_gradient(x)
    return NotImplemented


def _warn_of_missing_gradient(x: DeferredLogits) -> None:
    if x.recorded.call.has_loss:
        warn_once(
            "missing gradient",
            "The gradient of the logits was requested after a loss had been computed without them, so it lacks that "
            "loss. Request it before the loss, or train with `liger_kernel_config={'linear_cross_entropy': false, "
            "'cross_entropy': false}`, which builds the logits. (Shown once.)",
        )


def _shaped(x: DeferredLogits, native: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Records `native` if it changes leading dimensions only; it runs on `meta` and raises its own errors there."""
    meta = native(x.meta)
    vocab_size = x.meta.shape[-1]
    lead = math.prod(x.meta.shape[:-1])
    if not meta.dim() or meta.shape[-1] != vocab_size or math.prod(meta.shape[:-1]) != lead:
        return NotImplemented
    hidden = x.recorded.hidden
    child = x.derive(meta, hidden.reshape(*meta.shape[:-1], hidden.shape[-1]))
    if meta.untyped_storage()._cdata == x.meta.untyped_storage()._cdata:
        return x.add_view(child, native)
    return child


@_records(T.view, T.reshape, torch.reshape)
def _reshape(x: DeferredLogits, *sizes: Any, **kwargs: Any) -> Any:
    if kwargs or (len(sizes) == 1 and isinstance(sizes[0], torch.dtype)):
        return NotImplemented
    return _shaped(x, lambda logits: logits.view(*sizes) if x.meta.is_contiguous() else logits.reshape(*sizes))


@_records(T.view_as, T.reshape_as)
def _reshape_as(x: DeferredLogits, other: torch.Tensor) -> Any:
    return _reshape(x, *other.shape)


@_records(T.flatten, torch.flatten)
def _flatten(x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    return _shaped(x, lambda logits: logits.flatten(*args, **kwargs))


@_records(T.unsqueeze, torch.unsqueeze)
def _unsqueeze(x: DeferredLogits, dim: int) -> Any:
    if dim in (-1, x.meta.dim()):
        return NotImplemented
    return _shaped(x, lambda logits: logits.unsqueeze(dim))


@_records(T.squeeze, torch.squeeze)
def _squeeze(x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    if x.meta.shape[-1] == 1:
        return NotImplemented
    return _shaped(x, lambda logits: logits.squeeze(*args, **kwargs))


def _dividing(function: Callable[..., Sequence[torch.Tensor]]) -> Callable:
    """Records `function` if it cuts the logits along a leading dimension; it runs on `meta`, with its own errors."""

    def recorder(x: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        parts = function(x.meta, *args, **kwargs)
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        if dim in (-1, x.meta.dim() - 1):
            return NotImplemented
        before = (slice(None),) * (dim % x.meta.dim())
        ends = itertools.accumulate((part.shape[dim] for part in parts), initial=0)
        return tuple(_getitem(x, (*before, slice(start, end))) for start, end in itertools.pairwise(ends))

    return recorder


RECORDERS.update({function: _dividing(function) for function in (T.split, torch.split, T.chunk, torch.chunk)})


@_records(T.__getitem__)
def _getitem(x: DeferredLogits, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    if not _leaves_vocab_whole(items, x.meta.dim(), x.meta.shape[-1]):
        return _of_vocab(x, items)
    # A slice of the vocabulary, if there is one, is a full slice; so it is for the hidden states.
    rows = (*items[:-1], slice(None)) if _reaches_last(items, x.meta.dim()) else items
    hidden = x.recorded.hidden[rows]
    basic = not any(isinstance(item, (torch.Tensor, list)) for item in items)
    if basic:
        meta = x.meta[index]
    else:
        meta = torch.empty(*hidden.shape[:-1], x.meta.shape[-1], dtype=x.meta.dtype, device="meta")
    child = x.derive(meta, hidden)
    return x.add_view(child, lambda logits: logits[index]) if basic else child


def _of_vocab(x: DeferredLogits, items: tuple) -> Any:
    """``x[items]`` with an index of the vocabulary: the tokens first, whose logits are then few or come in chunks."""
    *tokens, last = items
    consumed = [_consumed(item) for item in items]
    if None in consumed or consumed[-1] != 1 or sum(1 for item in tokens if item is Ellipsis) > 1:
        return NotImplemented
    if not _reaches_last(items, x.meta.dim()) or not runs_in_chunks(x):
        return NotImplemented
    if any(isinstance(item, (torch.Tensor, list)) for item in tokens):  # it goes together with an index like it
        return NotImplemented
    rows = x if all(item is Ellipsis or item == slice(None) for item in tokens) else _getitem(x, (*tokens, slice(None)))
    if not runs_in_chunks(rows):
        return rows[..., last]
    return NotImplemented if isinstance(last, int) else columns_of(rows, last)


def _consumed(item: Any) -> int | None:
    """The number of dimensions that an index takes; None for one that is not recorded."""
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


def _reaches_last(items: tuple, dims: int) -> bool:
    """Whether the last of `items` is an index of the last of `dims` dimensions."""
    if Ellipsis in [item for item in items if not isinstance(item, torch.Tensor)]:
        return items[-1] is not Ellipsis
    return sum(_consumed(item) or 0 for item in items) == dims


def _leaves_vocab_whole(items: tuple, dims: int, vocab_size: int) -> bool:
    """Whether `items` index leading dimensions only; a full slice of the last one counts as none."""
    consumed = [_consumed(item) for item in items]
    if None in consumed or sum(1 for item in items if item is Ellipsis) > 1:
        return False
    if not _reaches_last(items, dims):
        return sum(count or 0 for count in consumed) < dims
    last = items[-1]
    return isinstance(last, slice) and _is_full(last, vocab_size)
