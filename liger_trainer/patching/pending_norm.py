"""The result of a norm that is not computed until something needs it.

The norms of queries and keys give one, and the rotary function, where it receives two, norms and rotates in one pass.
To anything else it is the tensor: it is computed once, with the values and the graph it would have had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from liger_trainer.head.computed_on_use import ComputedOnUse, call_built
from liger_trainer.kernels.norms.rms_norm import rms_norm

_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow matmul rmatmul neg pos "
    "abs invert and or xor eq ne lt le gt ge getitem setitem len iter bool float int index contains"
)


# The norms of attentions that are running. An entry is taken out by the call that put it in, so that threads which run
# different layers (autograd's recompute checkpoints) do not disturb each other.
_awaited: list[nn.Module] = []


class PendingNorm(ComputedOnUse):
    """RMSNorm of `x`, pending.

    Args:
        x: The norm's input; a view of it, once the result was transposed.
        weight: The norm's weight.
        options: epsilon, offset and casting, as [`liger_trainer.functional.rms_norm`] takes them.
        value: The result where it is not simply that of `x`, as a function without arguments.
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
        """Whether nothing has needed the result yet."""
        return self._result is None

    def build(self, for_write: bool = False) -> torch.Tensor:
        """The result, the same tensor at every call."""
        if self._result is None:
            self._result = rms_norm(self.x, self.weight, *self.options) if self._value is None else self._value()
        return self._result

    def transpose(self, dim0: int, dim1: int) -> Any:
        """The result transposed, pending too if the normalised dimension stays the last."""
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
    """Whether `module` may return its result pending: its attention awaits it, and no hook would see it.

    Hooks may also act on its parameters before and after (FSDP2, ZeRO-3).
    """
    if not any(awaited is module for awaited in _awaited):
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and not torch.nn.modules.module._has_any_global_hook()


@functools.cache
def forward_awaiting(forward: Callable, names: tuple[str, str]) -> Callable:
    """`forward` of a module that awaits the results of its children `names` pending."""

    @functools.wraps(forward)
    def awaiting(self, *args, **kwargs):
        children = [self._modules[name] for name in names]
        _awaited.extend(children)
        try:
            return forward(self, *args, **kwargs)
        finally:
            for child in children:
                _awaited.remove(child)

    return awaiting
