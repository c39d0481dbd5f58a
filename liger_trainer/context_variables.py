"""Setting a context variable for the length of a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

_T = TypeVar("_T")


@contextlib.contextmanager
def set_to(variable: ContextVar[_T], value: _T) -> Iterator[None]:
    """`variable` has `value` inside, and afterwards what it had before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
