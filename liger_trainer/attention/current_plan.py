"""How a model's attention learns of a packed row: its mask functions ask for the plan that the row's maker set."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextvars import ContextVar

from liger_trainer.context_variables import set_to
from liger_trainer.kernels.attention.plan import AttentionPlan

PlanOf = Callable[[int, int], AttentionPlan]
"""The plan for a window and for chunks of so many tokens; 0 for none."""

_plan_of: ContextVar[PlanOf | None] = ContextVar("liger_trainer_packed_row", default=None)


class NotPackable(Exception):
    """A model has a mask that no plan of a packed row can express."""


def plans_from(plan_of: PlanOf) -> contextlib.AbstractContextManager[None]:
    """The forwards inside are of one packed row, and take their masks from `plan_of`."""
    return set_to(_plan_of, plan_of)


def current_plan_of() -> PlanOf | None:
    """The function of the packed row whose forward is running, if any."""
    return _plan_of.get()
