"""The result of a norm that is not computed until a function needs it.

The norms of queries and keys return one. The rotary function, given two, normalises and rotates in one pass; for any
other function the norm is computed, once, with the values and the graph that it would have had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.compat.hooks import is_call_hooked
from liger_trainer.head.computed_on_use import ComputedOnUse, call_built
from liger_trainer.kernels.norms.rms_norm import rms_norm

_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow matmul rmatmul neg pos "
    "abs invert and or xor eq ne lt le gt ge getitem setitem len iter bool float int index contains"
)


# The norms of the attentions that are running. The call that adds an entry removes it, so threads that run different
# layers (when autograd recomputes checkpoints) do not interfere.
_awaited: list[nn.Module] = []


class PendingNorm(ComputedOnUse):
    """RMSNorm of `x`, not yet computed.

    Args:
        x: The norm's input, or a view of it after the result was transposed.
        weight: The norm's weight.
        options: epsilon, offset and casting, as [`liger_trainer.functional.rms_norm`] takes them.
        value: Computes the result if it is not simply the norm of `x`.
    """

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        options: tuple[float, float, str],
        value: Callable[[], torch.Tensor] | None = None,
    ) -> None:
        self.x, self.weight, self.options = x, weight, options
        self._value = value
        self._result: torch.Tensor | None = None

    @property
    def is_pending(self) -> bool:
        """Whether the result has not been computed yet."""
        return self._result is None

    def build(self, for_write: bool = False) -> torch.Tensor:
        """The result, the same tensor at every call."""
        if self._result is None:
            self._result = rms_norm(self.x, self.weight, *self.options) if self._value is None else self._value()
        return self._result

    def transpose(self, dim0: int, dim1: int) -> Any:
        """The transposed result; not computed either if the normalised dimension stays the last."""
        last = self.x.dim() - 1
        if not self.is_pending or last in (dim0 % (last + 1), dim1 % (last + 1)):
            return self.build().transpose(dim0, dim1)
        view = self.x.transpose(dim0, dim1)
        return PendingNorm(view, self.weight, self.options, lambda: self.build().transpose(dim0, dim1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.build(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call_built(func, args, kwargs or {})


def _operator(name: str) -> Callable:
    def run(self: PendingNorm, *args: Any) -> Any:
        return call_built(getattr(self.build(), name), args, {})

    return run


for _name in _OPERATORS.split():
    setattr(PendingNorm, f"__{_name}__", _operator(f"__{_name}__"))
PendingNorm.__hash__ = object.__hash__  # type: ignore[method-assign]


def may_pend(module: nn.Module) -> bool:
    """Whether `module` may return a [`PendingNorm`]: its attention expects one, and there are no hooks.

    Hooks would get the result, and may gather and free parameters around the call (FSDP2, ZeRO-3).
    """
    return any(awaited is module for awaited in _awaited) and not is_call_hooked(module)


@functools.cache
def forward_awaiting(forward: Callable, names: tuple[str, str]) -> Callable:
    """`forward` of a module whose children `names` may return a [`PendingNorm`] meanwhile."""

    @functools.wraps(forward)
    def awaiting(self, *args, **kwargs):
        children = [getattr(self, name) for name in names]
        _awaited.extend(children)
        try:
            return forward(self, *args, **kwargs)
        finally:
            for child in children:
                _awaited.remove(child)

    return awaiting
