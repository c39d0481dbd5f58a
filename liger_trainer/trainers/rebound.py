"""TRL's own functions with other functions behind some of the names they call."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from liger_trainer.patching.rebound import rebound, uses_global


def rebound_trl(function: Callable, **names: Any) -> Any:
    """A copy of TRL's `function` that finds these values behind the global `names`.

    Raises:
        ImportError: where `function` calls no such name, as after a change of TRL.
    """
    assert isinstance(function, types.FunctionType)
    unknown = [name for name in names if not uses_global(function, name)]
    if unknown:
        raise ImportError(
            f"{function.__module__}.{function.__qualname__} of the installed version does not use {unknown}, through "
            "which the Liger trainer takes its part. Supported is trl>=1.16,<2: `pip install 'trl>=1.16,<2'`."
        )
    return rebound(function, names)
