"""The casts that autocast applies to the operands of a linear layer, for operators that autocast does not know."""

from __future__ import annotations

from typing import overload

import torch


@overload
def as_autocast(x: torch.Tensor) -> torch.Tensor: ...
@overload
def as_autocast(x: None) -> None: ...
def as_autocast(x: torch.Tensor | None) -> torch.Tensor | None:
    """`x` as autocast would pass it to a linear layer; float64 is unchanged."""
    if x is None or x.dtype == torch.float64:
        return x
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # asking about the meta device is an error
        return x
    return x.to(torch.get_autocast_dtype(device))


def head_as_autocast(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Hidden states, weight and bias of an LM head as autocast would pass them to its linear layer."""
    return as_autocast(hidden), as_autocast(weight), None if bias is None else as_autocast(bias)
