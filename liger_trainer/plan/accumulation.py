"""When gradients are reduced: with the last micro-batch of a step, or after each if the recipe asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def sync_each_batch(values: Mapping[str, Any]) -> bool:
    """Whether gradients are reduced after every micro-batch, by the key of this name in `accelerator_config`.

    Raises:
        ValueError: if `accelerator_config` is neither a mapping nor the path of a JSON file with one.
    """
    config = values["accelerator_config"]
    if isinstance(config, str):
        config = _read(config)
    if config is not None and not isinstance(config, Mapping):
        raise ValueError(f"`accelerator_config` is {config!r}; it must be a mapping, or the path of a JSON file.")
    return bool(((config or {}).get("gradient_accumulation_kwargs") or {}).get("sync_each_batch", False))


def _read(text: str) -> Any:
    try:
        return json.loads(text if text.lstrip().startswith("{") else Path(text).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"`accelerator_config` is {text!r}, which cannot be read: {error}") from error
