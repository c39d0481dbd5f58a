"""The choice of our implementation for one module of experts, by a view of the config that it asks.

It can be undone, and leaves the model's config, with what is saved or made of it, as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

IMPLEMENTATION = "liger_trainer"
"""Our name in transformers' registry."""


class ChosenConfig:
    """A module's config that names our implementation, and is the model's in all else; a copy elsewhere is the latter.

    Args:
        config: The model's.
        forward: What the implementation is for this module.
    """

    def __init__(self, config: Any, forward: Callable) -> None:
        self._experts_implementation = IMPLEMENTATION
        self.model_config = config
        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model_config"], name)

    def __deepcopy__(self, memo: dict[int, Any]) -> ChosenConfig:
        return ChosenConfig(copy.deepcopy(self.model_config, memo), self.forward)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.model_config,)


def _itself(config: Any) -> Any:
    return config


def choose(module: Any, forward: Callable) -> None:
    """Makes `forward` the implementation of this `module` alone."""
    module.config = ChosenConfig(module.config, forward)


def is_chosen(module: Any) -> bool:
    """Whether the implementation of `module` is ours."""
    return isinstance(module.__dict__.get("config"), ChosenConfig)


def unchoose(module: Any) -> bool:
    """Gives the module its config back; False if it has no other."""
    if not is_chosen(module):
        return False
    module.config = module.config.model_config
    return True
