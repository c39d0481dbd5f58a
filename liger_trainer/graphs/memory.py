"""Memory that graphs of all calls read and write, one call after the other."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch

from liger_trainer.kernels.runtime import next_power_of_2


class SharedMemory:
    """Memory by what it is for: calls with fewer tokens have the beginning of what those with more have.

    What is in it holds for one call. Its sizes are powers of two, so that calls of many lengths need few of them.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakValueDictionary[Hashable, torch.Tensor] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all that is in use."""
        return sum(each.nbytes for each in self._of.values())

    def of(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """As many bytes as `tensor` has, or more, as long as the result is held.

        Args:
            name: The name of their use: tensors that exist at the same time have different ones.
            tensor: A tensor without gaps between its numbers.
        """
        nbytes = next_power_of_2(max(1, tensor.nbytes))
        key = (name, nbytes, tensor.device)
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        return found


class Buffers:
    """What all layers of one shape read and write: their input, their result, and the gradients.

    Args:
        hidden: An input, (B, S, H).
        parameter_gradients: Tensors for the gradients of the trained parameters of a layer.
        memory: Where all others are.
    """

    def __init__(self, hidden: torch.Tensor, parameter_gradients: list[torch.Tensor], memory: SharedMemory) -> None:
        self._memory = memory
        self._held: dict[Hashable, torch.Tensor] = {}
        self.hidden, self.result, self.gradient, self.hidden_gradient = (
            self._like(name, hidden) for name in ("hidden", "result", "gradient", "gradient of hidden")
        )
        self.parameter_gradients = parameter_gradients

    def others(self, of: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Tensors like these, the same ones for all layers whose tensors `of` something are alike; None for None."""
        return [None if each is None else self._like((of, place), each) for place, each in enumerate(tensors)]

    def _like(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is laid out as this one: a sum over another layout would add in another order."""
        self._held[name, tensor.nbytes] = memory = self._memory.of(name, tensor)
        stride = torch.empty_like(tensor, device="meta").stride()
        return memory.view(tensor.dtype).as_strided(tensor.size(), stride)
