"""Tensors on the device whose values the host has too, so that code which asks for them does not wait.

The collator has the batch on the CPU before it is copied. TRL derives labels and masks from it on the device, chooses
tokens by a mask, and we lay out packed rows by the labels. An [`OnHost`] tensor of the batch goes through this code as
on the device. What is computed from such tensors alone, by one of a few functions, is one again; its values on the host
are computed from theirs when they are asked for. All else gives plain tensors.

Values are known as long as nobody writes to the tensor but by an index, and not in inference mode, where torch does not
count writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from liger_trainer.head.lm_head import version_of
from liger_trainer.kernels.runtime import sent

_FOLLOWED = frozenset(
    {
        *("__getitem__", "index_select", "chunk", "split", "cat", "stack", "pad", "view", "flatten", "bool", "long"),
        *("__eq__", "eq", "__ne__", "ne", "__invert__", "bitwise_not", "masked_fill", "__mul__", "mul", "sum", "amax"),
        "detach",
    }
)
"""The functions whose results follow from the values of their arguments on the host."""
_READS = frozenset({"item", "tolist", "cpu", "__bool__", "__int__", "__index__"})


class _Values:
    """Values on the host, which are computed at the first call."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute: Callable[[], Any] | None = compute
        self._found: Any = None

    def __call__(self) -> Any:
        if self._compute is not None:
            self._found, self._compute = self._compute(), None
        return self._found

    def part(self, place: int) -> _Values:
        """The values of one of several tensors."""
        return _Values(lambda: self()[place])


class OnHost(torch.Tensor):
    """A tensor on the device whose values the host knows.

    Attributes:
        on_device: The tensor, as the device's code gets it.
        version: How often it had been changed in place when its values were known.
        values: Returns the values on the host.
    """

    on_device: torch.Tensor
    version: int | None
    values: _Values

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "__get__":  # an attribute, such as the shape
            return func(*map(plain, args))
        if name in _READS and values_of(args[0]) is not None:
            return func(args[0].values(), *args[1:], **kwargs)
        if name == "nonzero" and values_of(args[0]) is not None and not kwargs.get("as_tuple"):
            places = args[0].values().nonzero()
            return on_host(sent(places, args[0].on_device.device), places)
        if name == "__getitem__" and isinstance(args[1], OnHost) and args[1].dtype == torch.bool:
            return plain(args[0])[_places(args[1])]
        if name == "__setitem__" and isinstance(args[0], OnHost):
            return _set(*args)
        result = func(*tree_map(plain, args), **tree_map(plain, kwargs))
        if name == "to" and isinstance(args[0], OnHost) and isinstance(result, torch.Tensor):
            if result is args[0].on_device:
                return args[0]
            name, args, kwargs = "", (args[0],), {"dtype": result.dtype}
        elif name not in _FOLLOWED or not all(map(_is_known, _tensors(name, args, kwargs))):
            return result
        given = tree_map(lambda each: each.values if isinstance(each, OnHost) else each, (args, kwargs))
        return _followed(func, given, result)


def on_host(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`tensor`, which has these `values` on the host."""
    return _on_host(tensor, _Values(lambda: values))


def _on_host(tensor: torch.Tensor, values: _Values) -> torch.Tensor:
    found = tensor.as_subclass(OnHost)
    found.on_device, found.version, found.values = tensor, version_of(tensor), values
    return found


def values_of(tensor: Any) -> torch.Tensor | None:
    """The values of a tensor on the host; None if they are not known."""
    return tensor.values() if _is_known(tensor) and isinstance(tensor, OnHost) else None


def plain(value: Any) -> Any:
    """A tensor without its values on the host; anything else as it is."""
    return value.on_device if isinstance(value, OnHost) else value


def _is_known(tensor: Any) -> bool:
    return isinstance(tensor, OnHost) and tensor.version == version_of(tensor.on_device) is not None


def _tensors(name: str, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors whose values a function asks the device for; an index may have tensors of the host."""
    for each in tree_leaves((args, kwargs)):
        if isinstance(each, torch.Tensor) and (
            name != "__getitem__" or isinstance(each, OnHost) or each is args[0] or each.device.type != "cpu"
        ):
            yield each


def _followed(func: Any, given: Any, result: Any) -> Any:
    def compute() -> Any:
        args, kwargs = tree_map(lambda each: each() if isinstance(each, _Values) else each, given)
        return func(*args, **kwargs)

    values = _Values(compute)
    if isinstance(result, torch.Tensor):
        return _on_host(result, values)
    return tuple(_on_host(each, values.part(place)) for place, each in enumerate(result))


def _places(mask: OnHost) -> Any:
    values = values_of(mask)
    if values is None:
        return mask.on_device
    return tuple(sent(each.contiguous(), mask.on_device.device) for each in values.nonzero().unbind(1))


def _set(tensor: OnHost, index: Any, value: Any) -> None:
    before = values_of(tensor)
    tensor.on_device[plain(index)] = plain(value)
    if before is None or any(isinstance(each, torch.Tensor) for each in tree_leaves((index, value))):
        return  # the version tells that the values are no longer known
    after = before.clone()
    after[index] = value
    tensor.version, tensor.values = version_of(tensor.on_device), _Values(lambda: after)
