"""TRL's own functions with other functions behind some of the names they call."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


def rebound(function: Callable, **names: Any) -> Any:
    """A copy of `function` that finds these values behind the global `names`; it and its module stay as they are.

    Raises:
        ImportError: where `function` calls no such name, as after a change of the library it is from.
    """
    assert isinstance(function, types.FunctionType)
    unknown = [name for name in names if name not in function.__code__.co_names or name not in function.__globals__]
    if unknown:
        raise ImportError(
            f"{function.__module__}.{function.__qualname__} of the installed version does not use {unknown}, through "
            "which the Liger trainer takes its part. Supported is trl>=1.15,<2: `pip install 'trl>=1.15,<2'`."
        )
    namespace = {**function.__globals__, **names}
    copy = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
