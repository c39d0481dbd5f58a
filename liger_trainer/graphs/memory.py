"""Memory that the graphs of all calls share: they read and write it one call after the other."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence

import torch

from liger_trainer.kernels.runtime import next_power_of_2


class SharedMemory:
    """Memory for each use, which calls of different lengths share.

    Its sizes are powers of two, so that calls of many lengths need few of them; a shorter call uses the beginning. The
    content is valid for one call.
    """

    def __init__(self) -> None:
        self._of: weakref.WeakValueDictionary[Hashable, torch.Tensor] = weakref.WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of all that is in use."""
        return sum(each.nbytes for each in self._of.values())

    def of(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a use, of at least as many bytes as `tensor`: the same each time, as long as a result is held.

        Args:
            name: The name of the use. Tensors that are in use at the same time have different names.
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
        memory: The memory of all other tensors.
    """

    def __init__(self, hidden: torch.Tensor, parameter_gradients: list[torch.Tensor], memory: SharedMemory) -> None:
        self._memory = memory
        self._held: dict[Hashable, torch.Tensor] = {}
        self.hidden, self.result, self.gradient, self.hidden_gradient = (
            self._like(name, hidden) for name in ("hidden", "result", "gradient", "gradient of hidden")
        )
        self.parameter_gradients = parameter_gradients

    def others(self, of: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Buffers like `tensors`, for the use `of`; None for None. Layers with tensors of the same size share them."""
        return [None if each is None else self._like((of, place), each) for place, each in enumerate(tensors)]

    def _like(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """A buffer with the shape and layout of `tensor`: a sum over another layout would add in another order."""
        self._held[name, tensor.nbytes] = memory = self._memory.of(name, tensor)
        stride = torch.empty_like(tensor, device="meta").stride()
        return memory.view(tensor.dtype).as_strided(tensor.size(), stride)
