"""What a check finds, and how it says that it could not look."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Trap:
    """A mistake that training would not report.

    Args:
        what: The mistake, and why nothing shows it.
        fix: What to set, as keys of a recipe.
    """

    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}. Fix: {self.fix}."


class CannotCheckError(Exception):
    """Something could not be looked at; the text says why."""
