"""Forwards that are computed again in the backward as a whole: which of the two computations layers keep results of."""

from __future__ import annotations

import contextlib
import dataclasses
from contextvars import ContextVar

from liger_trainer.context_variables import set_to


@dataclasses.dataclass(frozen=True, eq=False)
class Pass:
    """One computation of a forward that is computed twice.

    Args:
        again: Whether it is the second one, in the backward. The first has no backward, so its layers keep nothing.
    """

    again: bool


_pass: ContextVar[Pass | None] = ContextVar("liger_trainer_pass", default=None)


def one_pass(again: bool) -> contextlib.AbstractContextManager[None]:
    """Declares that the forward inside is the first or the second computation of one."""
    return set_to(_pass, Pass(again))


def current_pass() -> Pass | None:
    """The computation that is running; None in a forward that is computed once."""
    return _pass.get()
