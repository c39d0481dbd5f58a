"""What autocast does to the operands of a linear layer, for operators that are one and are unknown to autocast."""

from __future__ import annotations

from typing import overload

import torch


@overload
def as_autocast(x: torch.Tensor) -> torch.Tensor: ...
@overload
def as_autocast(x: None) -> None: ...
def as_autocast(x: torch.Tensor | None) -> torch.Tensor | None:
    """`x` as autocast would give it to a linear layer."""
    if x is None or x.dtype == torch.float64 or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))
