"""The operations on logits that are deferred, as far as they are recorded.

Deferred logits and pending norms are results that are not computed until a function needs them (`ComputedOnUse`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import NESTED_VALUES


@dataclasses.dataclass(frozen=True)
class Cast:
    """``x.to(dtype)``."""

    dtype: torch.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the step."""
        return x.to(self.dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Scale:
    """``x * factor`` or ``x / factor``; `factor` is a number or a 0-d tensor."""

    factor: float | torch.Tensor
    divide: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the step."""
        factor = self.factor
        if x.is_meta and isinstance(factor, torch.Tensor):
            factor = factor.to("meta")
        return x / factor if self.divide else x * factor

    @property
    def value(self) -> float | None:
        """The factor as a number; None if reading it would stall a device or lose a gradient."""
        factor = self.factor
        if isinstance(factor, torch.Tensor):
            if factor.requires_grad or factor.device.type != "cpu":
                return None
            factor = float(factor)
        if self.divide:
            return 1.0 / factor if factor else None
        return float(factor)


@dataclasses.dataclass(frozen=True)
class Tanh:
    """``tanh(x)``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the step."""
        return x.tanh()


@dataclasses.dataclass(frozen=True, eq=False)
class OfRows:
    """A function of whole rows, along the vocabulary: a softmax, or a slice of the vocabulary."""

    function: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the step."""
        return self.function(x)


Step = Cast | Scale | Tanh | OfRows


class FusedForm(NamedTuple):
    """The chain as options of the operators: ``softcap * tanh(x * logit_scale / softcap)``, or ``x * logit_scale``."""

    softcap: float | None
    logit_scale: float


@dataclasses.dataclass(frozen=True)
class RecordedChain:
    """Operations on logits, each on every row alone."""

    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> RecordedChain:
        """This chain followed by `step`."""
        return RecordedChain((*self.steps, step))

    def replay(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the steps to built logits, each in the dtype that it was recorded in."""
        for step in self.steps:
            logits = step(logits)
        return logits

    @functools.cached_property
    def fused_form(self) -> FusedForm | None:
        """The chain as a soft-cap and a scale; None if it is anything else.

        ``b * tanh(a * x)`` is a soft-cap of ``b`` after a scale of ``a * b``. Casts are left out: the operators compute
        in fp32, which is at least as exact.
        """
        before, after, capped = 1.0, 1.0, False
        for step in self.steps:
            if isinstance(step, OfRows):
                return None
            if isinstance(step, Tanh):
                if capped:
                    return None
                capped = True
            elif isinstance(step, Scale):
                factor = step.value
                if factor is None:
                    return None
                if capped:
                    after *= factor
                else:
                    before *= factor
        if not capped:
            return FusedForm(None, before)
        return FusedForm(after, before * after) if after > 0 else None


NOTHING_DONE = RecordedChain()
"""The chain of the logits that a head returns."""


tree_map, tree_leaves = require(NESTED_VALUES)


class ComputedOnUse:
    """The result of an operation that has not run yet.

    Functions that know such a result take it apart; every other one runs on the tensor, which is computed once, with
    the values and the graph that it would have had.
    """

    def build(self, for_write: bool = False) -> torch.Tensor:
        """The tensor, the same one at every call.

        Args:
            for_write: Whether it will be changed in place.
        """
        raise NotImplementedError


def build(value: Any, for_write: bool = False) -> Any:
    """`value`, or the tensor if it is a result that is computed on use."""
    return value.build(for_write) if isinstance(value, ComputedOnUse) else value


def call_built(func: Callable, args: tuple, kwargs: dict[str, Any], for_write: bool = False) -> Any:
    """``func(*args, **kwargs)`` with tensors in the place of results that are computed on use."""
    args, kwargs = tree_map(lambda value: build(value, for_write), (args, kwargs))
    return own_function(func)(*args, **kwargs)


_OPERATORS = (
    "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv floordiv mod pow rpow matmul rmatmul neg pos "
    "abs invert and or xor eq ne lt le gt ge getitem setitem len iter bool float int index contains"
)


class Pending(ComputedOnUse):
    """A tensor that is not computed yet. Every attribute and function that is asked for takes the computed tensor."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.build(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return call_built(func, args, kwargs or {})


def _operator(name: str) -> Callable:
    def run(self: Pending, *args: Any) -> Any:
        return call_built(getattr(self.build(), name), args, {})

    return run


for _name in _OPERATORS.split():
    setattr(Pending, f"__{_name}__", _operator(f"__{_name}__"))
Pending.__hash__ = object.__hash__  # type: ignore[method-assign]


_OWN = dict(vars(functional))


def own_function(func: Callable) -> Callable:
    """The function of torch where `func` is what somebody has put into its place in `torch.nn.functional`.

    A function of that module hands itself over by its global name. What is found there, such as a loss with a factor,
    has called it, and must not run a second time.
    """
    now = vars(functional)
    return next((own for name, own in _OWN.items() if own is not func and now.get(name) is func), func)
