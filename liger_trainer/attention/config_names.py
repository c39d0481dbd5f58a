"""What configs name as their attention, also while continuous batching needs another one; without transformers too."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from liger_trainer.head.warn_once import warn_once

NAME = "liger_trainer"
"""Of our attention."""


@dataclasses.dataclass(eq=False)
class Away:
    """A config, what it names without managers, and the managers, by id, for which it may name another attention."""

    config: Any
    name: str
    managers: set[int]


AWAY: dict[int, Away] = {}
"""Those for which a manager lives, by the config's id."""


def name_of(config: Any) -> Any:
    """The attention that `config` names, or will name when no manager needs another."""
    away = AWAY.get(id(config))
    return config._attn_implementation if away is None else away.name


def set_name(config: Any, name: str) -> None:
    """Sets [`name_of`] a config, and not that of configs inside it."""
    if id(config) in AWAY:
        AWAY[id(config)].name = name
    else:
        config._attn_implementation = {"": name}


def say_if_away(model: nn.Module) -> None:
    """Warns, once, if `model` is trained while its attention is away."""
    away = AWAY.get(id(getattr(model, "config", None))) if AWAY else None
    if away is not None and away.name == NAME:
        warn_once(
            "attention away",
            f"{type(model).__name__} is trained while a manager of continuous batching has its attention: it runs as "
            "transformers' own, without our kernels. Call the manager's `stop()` before training.",
        )
