"""Records the calls of functions, which still run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def recorded_calls(
    monkeypatch: pytest.MonkeyPatch, module: Any, *names: str
) -> list[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """A list that grows with every call of these functions of `module`: name, function and positional arguments."""
    calls: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = []

    def record(name: str, native: Callable[..., Any]) -> None:
        def recording(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, native, args))
            return native(*args, **kwargs)

        monkeypatch.setattr(module, name, recording)

    for name in names:
        record(name, getattr(module, name))
    return calls
