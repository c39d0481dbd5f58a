"""A frozen linear layer whose weight is stored in fp8: the base of a LoRA layer with `fp8_base`.

It has no `weight`, so whatever reads or changes one, such as merging adapters, is an error and not a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import FP8_LAYERS
from liger_trainer.kernels.fp8.stored import Fp8Weight, fp8_stored_linear, store

require(FP8_LAYERS)


class Fp8Linear(nn.Module):
    """``nn.Linear`` with a weight in fp8; see `kernels/fp8/stored.py`.

    Codes and scales are frozen parameters, since DDP would broadcast buffers at every forward.

    Args:
        linear: The layer, whose bias stays as it is.
        device: Where the weight is cast and stays.

    Attributes:
        codes: (out_features, in_features), uint8: the bytes of float8_e4m3fn.
        scales: (out_features, 1), fp32.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        stored = store(linear.weight.detach().to(device))
        self.codes = nn.Parameter(stored.codes, requires_grad=False)
        self.scales = nn.Parameter(stored.scales, requires_grad=False)
        self.bias = linear.bias

    @property
    def qweight(self) -> torch.Tensor:
        """The codes, by the name under which PEFT looks for the device of further adapters."""
        return self.codes

    @property
    def stored(self) -> Fp8Weight:
        """The weight, as our operators take it."""
        return Fp8Weight(self.codes, self.scales)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) to (..., out_features), in the dtype of `x`, or that of autocast."""
        return fp8_stored_linear(x, self.stored, self.bias)

    def extra_repr(self) -> str:
        """The sizes, for `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Linear:
        """Moves with the model; a cast of the model changes neither codes nor scales."""
        before = self.codes.data, self.scales.data
        super()._apply(fn, recurse)
        for parameter, data in zip((self.codes, self.scales), before):
            if parameter.dtype != data.dtype:
                parameter.data = data.to(parameter.device)
        return self
