"""Memory that graphs of all calls read and write, one call after the other."""

from __future__ import annotations

import weakref
from collections.abc import Hashable

import torch


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
            name: What they are for; tensors that exist at the same time have different names.
            tensor: A tensor without gaps between its numbers.
        """
        nbytes = 1 << (max(1, tensor.nbytes) - 1).bit_length()
        key = (name, nbytes, tensor.device)
        found = self._of.get(key)
        if found is None:
            found = self._of[key] = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
        return found
