"""The noise of a second stock run: every linear layer sums its products in two halves.

The same seed on the same machine gives the same bits, so a run that is merely repeated measures nothing. What is wanted
is how far two right runs may be apart: runs that round elsewhere, in every layer, as other kernels do. Summing
``x @ W.T`` as the sum of two halves of its columns is such an arithmetic. It is no worse than the other order, works
for every model and on every device, and takes no more memory. Other ways measure less, or cannot always run:

- another order of micro-batches reorders one sum a step, and nothing inside the layers;
- eager attention in place of SDPA needs the matrix of all scores, which long sequences leave no room for, and some
  models have one implementation only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional


def split_sums(model: nn.Module) -> int:
    """Makes every linear layer of `model` sum its products in two halves.

    A layer with a forward of its own, such as bitsandbytes', is called on each half of the columns with the others 0.

    Returns:
        The number of layers.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.in_features > 1]
    for layer in layers:
        plain = type(layer).forward is nn.Linear.forward
        layer.forward = _Halves(layer) if plain else _MaskedHalves(layer, layer.forward)  # type: ignore[method-assign]
    return len(layers)


class _Halves:
    """The forward of a plain linear layer, whose weight is sliced."""

    def __init__(self, layer: nn.Linear) -> None:
        self.layer, self.half = layer, layer.in_features // 2

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        weight, half = self.layer.weight, self.half
        first = functional.linear(input[..., :half], weight[:, :half], self.layer.bias)
        return first + functional.linear(input[..., half:], weight[:, half:])


class _MaskedHalves:
    """The forward of any other linear layer; its bias, which it adds twice, is taken off once."""

    def __init__(self, layer: nn.Linear, forward: Any) -> None:
        self.layer, self.forward, self.half = layer, forward, layer.in_features // 2

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        first = torch.arange(input.shape[-1], device=input.device) < self.half
        total = self.forward(input * first) + self.forward(input * ~first)
        return total if self.layer.bias is None else total - self.layer.bias
