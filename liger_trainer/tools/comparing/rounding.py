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

from collections.abc import Callable
from functools import partial

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
        forward = partial(_halves, layer) if plain else partial(_masked_halves, layer, layer.forward)
        layer.forward = forward  # type: ignore[method-assign]
    return len(layers)


def _halves(layer: nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward of a plain linear layer, whose weight is sliced."""
    half = layer.in_features // 2
    first = functional.linear(input[..., :half], layer.weight[:, :half], layer.bias)
    return first + functional.linear(input[..., half:], layer.weight[:, half:])


def _masked_halves(layer: nn.Linear, forward: Callable, input: torch.Tensor) -> torch.Tensor:
    """The `forward` of any other linear layer; its bias, which is added twice, is taken off once."""
    first = torch.arange(input.shape[-1], device=input.device) < layer.in_features // 2
    total = forward(input * first) + forward(input * ~first)
    return total if layer.bias is None else total - layer.bias
