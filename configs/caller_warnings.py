"""Warnings of TRL that name the line of the user's, though a method of ours stands between the two.

TRL counts stack frames (`stacklevel`) to find the line that called it. Where our class overrides the method, that line
is one of ours.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

_showing = threading.RLock()


@contextlib.contextmanager
def warnings_of_the_caller() -> Iterator[None]:
    """Inside, a warning that names a line of this package is shown with the line that called the package.

    Which warnings are shown, and how often, stays with the user's filters.
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


def _caller_of_ours(filename: str, lineno: int) -> FrameType | None:
    """The frame outside of this package that led to the line; None where the line is not ours."""
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
