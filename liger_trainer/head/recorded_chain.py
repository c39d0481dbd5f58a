"""The elementwise operations a model applies to its logits, recorded in their order."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

RECORDABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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
        """The factor as a number; None where reading it would stall a device or lose its gradient."""
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


class FusedForm(NamedTuple):
    """The chain as the operators take it: ``softcap * tanh(x * logit_scale / softcap)``, or ``x * logit_scale``."""

    softcap: float | None
    logit_scale: float


@dataclasses.dataclass(frozen=True)
class RecordedChain:
    """Elementwise operations on logits."""

    steps: tuple[Cast | Scale | Tanh, ...] = ()

    def then(self, step: Cast | Scale | Tanh) -> RecordedChain:
        """This chain followed by `step`."""
        return RecordedChain((*self.steps, step))

    def replay(self, logits: torch.Tensor) -> torch.Tensor:
        """Applies the steps to logits that exist, each in the dtype it was recorded in."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def fused_form(self) -> FusedForm | None:
        """The chain as a soft-cap and a scale; None where it is something else.

        ``b * tanh(a * x)`` is a soft-cap of ``b`` after a scale of ``a * b``. Casts round to what the operators compute
        anyway, more exactly, in fp32.
        """
        before, after, capped = 1.0, 1.0, False
        for step in self.steps:
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
