"""The base of every error that the command line shows as one line, without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that the user can correct; its text is the whole message."""
