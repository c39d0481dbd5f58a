"""The version, read by the build without importing torch, and functions of rows that are cached by it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

__version__ = "0.1.0"


@dataclasses.dataclass(frozen=True)
class OfThisVersion:
    """A function of rows whose cached results another version of ours does not take.

    `datasets` caches what a function makes, and knows a function of a package by its name alone.
    """

    function: Callable[..., dict[str, Any]]
    version: str = __version__

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The result of the function."""
        return self.function(*args, **kwargs)
