"""Warnings that are shown once in a process."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_said: set[str] = set()


def warn_once(key: str, message: str) -> None:
    """Logs `message`, unless a message with the same `key` has been logged before."""
    if key not in _said:
        _said.add(key)
        logger.warning(message)
