"""The modules and parameters of a model in training, which are walked over again only where they have changed.

The Trainer sets the mode of every module before each micro-batch, and looks for the gradient of every parameter twice a
step: to clip it and to remove it. In a model with thousands of modules these walks take the host longer than the GPU
takes for a layer. Whether anything has changed is seen in a flat list, without a walk: a module that was replaced or
added, one in the other mode, a parameter that was replaced, or that is trained from now on.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

_KEYS = ("_modules", "_parameters", "training")  # of the `__dict__` of a module
_children, _weights, _mode = map(operator.itemgetter, _KEYS)
_values = operator.methodcaller("values")

_SETS_THE_MODE_ALONE = {nn.Module.train, DistributedDataParallel.train, PreTrainedModel.train}
"""Methods `train` that do nothing to a module which is in training already."""


class ModuleTree:
    """The modules and parameters of a model.

    Args:
        model: The model, with its wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._walk()

    def _walk(self) -> None:
        parts = [*self.model.modules()]
        self._own = [vars(part) for part in parts]
        self._can_tell = all(own.keys() >= {*_KEYS} for own in self._own)  # not in modules that torch has compiled
        alone = all(type(part).train in _SETS_THE_MODE_ALONE and "train" not in vars(part) for part in parts)
        self._may_skip_mode = self._can_tell and alone
        self._seen = self._now() if self._can_tell else []
        self._named: dict[str, nn.Parameter] | None = None

    def _now(self) -> list[Any]:
        """The children and parameters of every module."""
        held = itertools.chain(map(_children, self._own), map(_weights, self._own))
        return [*itertools.chain.from_iterable(map(_values, held))]

    def _holds(self) -> bool:
        """Whether the modules and parameters are those of the last walk."""
        if not self._can_tell:
            return False
        now = self._now()
        return len(now) == len(self._seen) and all(map(operator.is_, now, self._seen))

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name, as [`torch.nn.Module.named_parameters`] finds them."""
        if self._named is None or not self._holds():
            self._walk()
            self._named = dict(self.model.named_parameters())
        return self._named

    def with_gradients(self) -> dict[str, nn.Parameter]:
        """The parameters that have a gradient, by name."""
        return {name: parameter for name, parameter in self.parameters().items() if parameter.grad is not None}

    @contextlib.contextmanager
    def mode_is_kept(self) -> Iterator[None]:
        """In the context, the first call of the model's `train` does nothing if every module is in training."""
        waiting = None if "train" in vars(self.model) else _NextCall(self.model, "train", self._train)
        try:
            yield
        finally:
            if waiting is not None:
                waiting.forget()

    def _train(self, mode: bool = True) -> nn.Module:
        if mode is True and self._may_skip_mode:
            if not self._holds():
                self._walk()
            elif all(map(_mode, self._own)):
                return self.model
        return self.model.train(mode)

    def gradients_are_removed(self) -> None:
        """The next call of the model's `zero_grad` removes the gradients of the parameters that it has now."""
        if type(self.model).zero_grad is nn.Module.zero_grad and "zero_grad" not in vars(self.model):
            _NextCall(self.model, "zero_grad", self._zero_grad)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.model.zero_grad(set_to_none)
            return
        for parameter in self.parameters().values():
            if parameter.grad is not None:
                parameter.grad = None

    def forget(self) -> None:
        """Gives the model its own methods again."""
        for name in ("train", "zero_grad"):
            waiting = vars(self.model).get(name)
            if isinstance(waiting, _NextCall):
                waiting.forget()


class _NextCall:
    """Stands for a method of one module at its next call.

    Args:
        module: The module, whose class has the method.
        name: The name of the method.
        instead: The function in its place; the method is the module's own again when that is called.
    """

    def __init__(self, module: nn.Module, name: str, instead: Callable[..., Any]) -> None:
        self._module, self._method, self._instead = module, name, instead
        vars(module)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of what is called in the place of the method."""
        self.forget()
        return self._instead(*args, **kwargs)

    def forget(self) -> None:
        """Gives the module its own method again."""
        if vars(self._module).get(self._method) is self:
            del vars(self._module)[self._method]
