"""Warnings as a user sees them: at a line of the user's code, and not where nothing can be done about them.

TRL counts stack frames (`stacklevel`) to find the line that called it. If one of our methods overrides TRL's, that line
is ours, so it is replaced by the line that called this package.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

_showing = threading.RLock()


@contextlib.contextmanager
def warnings_of_the_caller() -> Iterator[None]:
    """In this context, a warning at a line of this package is shown with the line that called the package.

    The user's filters still decide which warnings are shown, and how often.
    """
    with _showing:
        show = warnings.showwarning

        def relocated(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            caller = _caller_of_ours(filename, lineno)
            if caller is not None:
                filename, lineno, line = caller.f_code.co_filename, caller.f_lineno, None
            show(message, category, filename, lineno, file, line)

        warnings.showwarning = relocated
        try:
            yield
        finally:
            warnings.showwarning = show


@contextlib.contextmanager
def hidden_warnings(message: str = "", category: type[Warning] = Warning) -> Iterator[None]:
    """In this context, warnings of this category are not shown, in all threads.

    Args:
        message: A regular expression that their texts begin with; all texts by default.
        category: Their class.
    """
    # `catch_warnings` would discard filters that are set in the meantime, and forget which warnings were shown; and
    # `filterwarnings` would move a filter that is there already.
    filters: Any = warnings.filters
    added = ("ignore", re.compile(message, re.IGNORECASE) if message else None, category, None, 0)
    filters.insert(0, added)
    try:
        yield
    finally:
        if added in filters:
            filters.remove(added)


def _caller_of_ours(filename: str, lineno: int) -> FrameType | None:
    """The frame outside this package that led to the line; None if the line is not in this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and (frame.f_code.co_filename, frame.f_lineno) != (filename, lineno):
        frame = frame.f_back
    if frame is None or not _is_ours(frame):
        return None
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _is_ours(frame: Any) -> bool:
    # The `__init__` of a dataclass has no file, but the globals of its module.
    return str(frame.f_globals.get("__name__", "")).startswith(("liger_trainer.", "contextlib"))
