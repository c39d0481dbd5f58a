"""Which layers a recipe checkpoints; transformers' newer names win over the older ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def checkpointing_key(values: Mapping[str, Any]) -> str:
    """The key that switches checkpointing on in this recipe."""
    return _key(values, "activation_checkpointing", "gradient_checkpointing")


def every_n_layers(values: Mapping[str, Any]) -> int:
    """With checkpointing, one decoder layer out of this many is checkpointed.

    Raises:
        ValueError: if it is not a positive integer.
    """
    key = _key(values, "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs")
    settings = values[key] or {}
    settings = json.loads(settings) if isinstance(settings, str) else settings
    every = settings.get("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise ValueError(f"`{key}` has `every_n_layers: {every!r}`; it must be an integer, 1 or more.")
    return every


def _key(values: Mapping[str, Any], newer: str, older: str) -> str:
    return older if values.get(newer) is None else newer
