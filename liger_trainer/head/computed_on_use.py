"""Results that are not computed until a function needs them: what deferred logits and pending norms share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from liger_trainer.compat.private import require
from liger_trainer.compat.torch import NESTED_VALUES

tree_map, tree_leaves = require(NESTED_VALUES)


class ComputedOnUse:
    """The result of an operation that has not run yet.

    Functions that know such a result take it apart; every other one runs on the tensor, which is computed once, with
    the values and the graph that it would have had.
    """

    def build(self, for_write: bool = False) -> torch.Tensor:
        """The tensor, the same one at every call.

        Args:
            for_write: Whether it will be changed in place.
        """
        raise NotImplementedError


def build(value: Any, for_write: bool = False) -> Any:
    """`value`, or the tensor if it is a result that is computed on use."""
    return value.build(for_write) if isinstance(value, ComputedOnUse) else value


def call_built(func: Callable, args: tuple, kwargs: dict[str, Any], for_write: bool = False) -> Any:
    """``func(*args, **kwargs)`` with tensors in the place of results that are computed on use."""
    args, kwargs = tree_map(lambda value: build(value, for_write), (args, kwargs))
    return own_function(func)(*args, **kwargs)


_OWN = dict(vars(functional))


def own_function(func: Callable) -> Callable:
    """The function of torch where `func` is what somebody has put into its place in `torch.nn.functional`.

    A function of that module hands itself over by its global name. What is found there, such as a loss with a factor,
    has called it, and must not run a second time.
    """
    now = vars(functional)
    return next((own for name, own in _OWN.items() if own is not func and now.get(name) is func), func)
