"""Signatures of functions in the form of `tests/peers/liger_signatures.json`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def written(function: Callable[..., Any]) -> str:
    """The parameters of `function` with their defaults and without annotations."""
    parameters = inspect.signature(function).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    return str(inspect.Signature(bare))[1:-1]
