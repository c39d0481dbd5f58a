"""The operations on logits that are deferred, as far as they are recorded."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch


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
