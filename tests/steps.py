"""The step that a test runs in."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from liger_trainer.head.step import current_step, running


def step_with(**changes: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, what is known of the step has these changes."""
    return running(replace(current_step(), **changes))
