"""Warnings that are said once in a process."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_said: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Logs `message`, unless something was logged under `key` before."""
    if key not in _said:
        _said.add(key)
        logger.warning(message)
