"""Our attention's name in configs, and the configs that have another one while continuous batching needs it.

Without transformers, which patched models of plain torch do not need.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from liger_trainer.head.warn_once import warn_once

NAME = "liger_trainer"
"""The name of our attention."""


@dataclasses.dataclass(eq=False)
class Away:
    """A config, what it names without managers, and the managers, by id, for which it may name another attention."""

    config: Any
    name: str
    managers: set[int]


AWAY: dict[int, Away] = {}
"""The configs for whose models a manager lives, by id."""


def say_if_away(model: nn.Module) -> None:
    """Warns, once, if `model` is trained while its attention is away."""
    away = AWAY.get(id(getattr(model, "config", None))) if AWAY else None
    if away is not None and away.name == NAME:
        warn_once(
            "attention away",
            f"{type(model).__name__} is trained while a manager of continuous batching has its attention: it runs as "
            "transformers' own, without our kernels. Call the manager's `stop()` before training.",
        )
